"""Log-probs of sampled tokens by Tunix's own function, on the trainer's own arrays.

An engine with continuous batching and a trainer that pads run different shapes in different
layouts, so their sums have a different order. Where bits must be equal, the trainer's program
scores the sampled tokens.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tunix.rl.common import compute_per_token_logps

from sgljax_engine import (
    EngineStateError,
    InvalidConfigError,
    RuntimeConfig,
    WeightSyncError,
    flatten_named,
)
from tunix_sgljax import padding
from tunix_sgljax.exactness.masked_model import masked_model
from tunix_sgljax.lora import is_lora_name

_DATA_AXIS = "fsdp"
"""The mesh axis over which Tunix's trainer shards the rows of a batch by default."""


def trainer_logps(
    graphdef: Any,
    state: Any,
    prompts_BP: np.ndarray,
    completions_BC: np.ndarray,
    *,
    pad_id: int,
    eos_id: int,
    temperature: float,
    batch_size: int | None = None,
    wanted_B: np.ndarray | None = None,
    masks_BCN: np.ndarray | None = None,
) -> np.ndarray:
    """The result of `tunix.rl.common.compute_per_token_logps`, float32 [B, C], batch by batch.

    The model runs where its state's arrays are. Prompts are left-padded and completions
    right-padded int32; padding has values too. The last batch repeats rows, so that all batches
    have one shape. Batches without a wanted row are skipped: 0. A temperature of 0 divides by
    nothing. With sampling masks the log-probs are those over the masks, see `keep_masked`.
    """
    num_rows = len(prompts_BP)
    size = num_rows if batch_size is None else batch_size
    out_BC = np.zeros(completions_BC.shape, np.float32)
    mesh = _mesh_of(state)
    for start in range(0, num_rows, size):
        rows = np.arange(start, start + size) % num_rows
        kept = min(size, num_rows - start)
        if wanted_B is not None and not wanted_B[rows[:kept]].any():
            continue
        scored = graphdef, state
        if masks_BCN is not None:
            masks = jnp.asarray(masks_BCN[rows])
            scored = nnx.split(masked_model(nnx.merge(graphdef, state), masks))
        with mesh or contextlib.nullcontext():
            logps = compute_per_token_logps(
                *scored,
                _placed(prompts_BP[rows], mesh),
                _placed(completions_BC[rows], mesh),
                pad_id=pad_id,
                eos_id=eos_id,
                temperature=temperature,
            )
        out_BC[rows[:kept]] = np.asarray(logps)[:kept]
    return out_BC


def _mesh_of(state: Any) -> Mesh | None:
    """The mesh of a state on several devices; Tunix enters it around its calls."""
    for leaf in jax.tree.leaves(state):
        sharding = leaf.sharding if isinstance(leaf, jax.Array) else None
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return sharding.mesh if sharding.mesh.size > 1 else None
    return None


def _placed(ids: np.ndarray, mesh: Mesh | None) -> Any:
    """Token ids, placed as in Tunix's trainer."""
    if mesh is None:
        return jax.numpy.asarray(ids)
    is_spread = _DATA_AXIS in mesh.shape and len(ids) % mesh.shape[_DATA_AXIS] == 0
    return jax.device_put(
        ids, NamedSharding(mesh, PartitionSpec(_DATA_AXIS if is_spread else None))
    )


class TrainerMatch:
    """Holds references to the trainer's weights by version, and scores tokens under them.

    A version is held while any call that began before the next version still runs. The newest is
    always held. Any thread.
    """

    def __init__(self, *, pad_id: int, eos_id: int, batch_size: int | None) -> None:
        self._pad_id = pad_id
        self._eos_id = eos_id
        self._batch_size = batch_size
        self._graphdef: Any = None
        self._params: Any = None  # a state with the right structure, for its names
        self._rest: Any = None  # the actor's state other than its parameters
        self._states: dict[int, Any] = {}
        self._starts: Counter[int] = Counter()  # newest versions when running calls began
        self._lock = threading.Lock()
        self._updating = threading.Lock()
        self._scoring = threading.Lock()  # memory for the logits of one batch at a time

    @property
    def versions(self) -> list[int]:
        with self._lock:
            return sorted(self._states)

    def state(self, version: int) -> Any:
        """The whole state of a version."""
        with self._lock:
            found = self._states.get(version)
        if found is None:
            with self._updating:  # its weights may serve before the update returns
                found = self._states.get(version)
        if found is None:
            raise EngineStateError(
                f"logprobs_mode='trainer_match' has no trainer's arrays for weight version "
                f"{version}, only for {self.versions}: weights must come through update_params"
            )
        return found

    # ------------------------------------------------------------------ weights

    def start(self, actor: nnx.Module) -> None:
        """Takes the actor's structure, and its arrays as version 0."""
        self._graphdef, self._params, self._rest = nnx.split(actor, nnx.Param, ...)
        self._params, self._rest = map(_frozen, (self._params, self._rest))
        self._hold(0, self._params)

    @contextlib.contextmanager
    def update(self, params: Any) -> Iterator[list[int]]:
        """Wraps an update of the engine; the block appends the version of these params."""
        with self._updating:
            ours, new = flatten_named(self._params), flatten_named(params)
            if all(map(is_lora_name, new)):  # the frozen base stays unchanged
                new = {n: x for n, x in ours.items() if not is_lora_name(n)} | new
            if ours.keys() != new.keys():
                raise WeightSyncError(
                    "logprobs_mode='trainer_match' needs all parameters of the actor and no "
                    f"others: missing {sorted(ours.keys() - new.keys())}, extra "
                    f"{sorted(new.keys() - ours.keys())}"
                )
            structure = jax.tree.structure(self._params)
            arrays = jax.tree.unflatten(structure, [new[name] for name in ours])
            versions: list[int] = []
            yield versions
            for version in versions:
                self._hold(version, arrays)

    def refuse_quantization(self, runtime: RuntimeConfig) -> None:
        for name, value, unset, what in (
            ("quantization", runtime.quantization, None, "weights"),
            ("kv_cache_dtype", runtime.kv_cache_dtype, "auto", "keys and values"),
        ):
            if value != unset:
                raise InvalidConfigError(
                    f"logprobs_mode='trainer_match' cannot be combined with {name}={value!r}: the "
                    f"log-probs would be the trainer's, and not those of the {what} that drew the "
                    "tokens"
                )

    def refuse_offload(self) -> None:
        """Raises InvalidConfigError; called on Tunix's signal that it offloads models."""
        raise InvalidConfigError(
            "logprobs_mode='trainer_match' cannot be combined with "
            "ClusterConfig(offload_to_cpu=True): it holds the trainer's arrays by reference, which "
            "would keep their device memory"
        )

    def refuse_processes(self, actor: nnx.Module) -> None:
        """Raises InvalidConfigError for an actor whose arrays span processes."""
        if all(
            x.is_fully_addressable
            for x in jax.tree.leaves(nnx.state(actor))
            if isinstance(x, jax.Array)
        ):
            return
        raise InvalidConfigError(
            "logprobs_mode='trainer_match' cannot be used with an actor that spans processes: "
            "scoring with the trainer's arrays is a collective, but each process samples prompts "
            "of its own, when it likes"
        )

    def release(self) -> None:
        with self._lock:
            self._states.clear()
        self._params = self._rest = None

    def _hold(self, version: int, params: Any) -> None:
        self._params = params
        with self._lock:
            self._states[version] = nnx.merge_state(params, self._rest)
            self._drop()

    def _drop(self) -> None:
        """Drops versions that no call can need any more. Called under the lock."""
        oldest = min([max(self._states, default=0), *self._starts])
        for version in [version for version in self._states if version < oldest]:
            del self._states[version]

    # ------------------------------------------------------------------ scores

    @contextlib.contextmanager
    def call(self, version: int) -> Iterator[None]:
        """Holds all versions from this one on inside the block."""
        with self._lock:
            self._starts[version] += 1
        try:
            yield
        finally:
            with self._lock:
                self._starts[version] -= 1
                self._starts += Counter()  # drops zeros
                self._drop()

    def sampled_logps(
        self,
        prompts_BP: np.ndarray,
        tokens: Sequence[np.ndarray],
        versions: Sequence[np.ndarray],
        *,
        width: int,
        temperature: float,
    ) -> list[np.ndarray]:
        """Log-probs of sampled tokens, each under the weights that sampled it; float32."""
        completions_BC = padding.right_pad(tokens, width, self._pad_id)
        versions_BC = padding.right_pad(versions, width, -1)
        out_BC = np.zeros(completions_BC.shape, np.float32)
        for version in sorted(set(versions_BC.ravel().tolist()) - {-1}):
            sampled_BC = versions_BC == version
            scored_BC = self._score(
                version, prompts_BP, completions_BC, temperature, sampled_BC.any(axis=1)
            )
            out_BC = np.where(sampled_BC, scored_BC, out_BC)
        return [row[: len(ids)] for row, ids in zip(out_BC, tokens, strict=True)]

    def given_logps(
        self, prompts_BP: np.ndarray, completions_BC: np.ndarray, *, temperature: float
    ) -> np.ndarray:
        """Log-probs of given completions under the newest weights, float32 [B, C]; 0 at padding."""
        scored_BC = self._score(
            max(self.versions, default=0), prompts_BP, completions_BC, temperature, None
        )
        mask_BC = padding.completion_mask(completions_BC, self._pad_id)
        return np.where(mask_BC, scored_BC, np.float32(0))

    def _score(
        self,
        version: int,
        prompts_BP: np.ndarray,
        completions_BC: np.ndarray,
        temperature: float,
        wanted_B: np.ndarray | None,
    ) -> np.ndarray:
        state = self.state(version)
        deleted = [name for name, x in flatten_named(state).items() if _is_deleted(x)]
        if deleted:
            raise EngineStateError(
                "logprobs_mode='trainer_match' reads the trainer's own arrays, and those of weight "
                f"version {version} were donated or deleted ({deleted[0]!r} and "
                f"{len(deleted) - 1} more)"
            )
        with self._scoring:
            return trainer_logps(
                self._graphdef,
                state,
                prompts_BP,
                completions_BC,
                pad_id=self._pad_id,
                eos_id=self._eos_id,
                temperature=temperature,
                batch_size=self._batch_size,
                wanted_B=wanted_B,
            )


def _frozen(state: Any) -> Any:
    """A copy of the state with its current arrays; Tunix's variables change with the model."""
    leaves, structure = jax.tree.flatten(state)
    return jax.tree.unflatten(structure, leaves)


def _is_deleted(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.is_deleted()
