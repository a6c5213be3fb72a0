"""LoRA actors: turns qwix's pairs beside a model's weights into rules for the engine.

qwix stores a pair beside the weight: `<w>_lora_a` and `<w>_lora_b`, `nnx.LoRAParam`s. After each
step Tunix passes only these leaves, so this module keeps the frozen base.
"""

from __future__ import annotations

import functools
import logging
import math
import numbers
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple, get_args

import jax
import qwix
from flax import nnx

from sgljax_engine import InvalidConfigError, LoraRule, WeightSyncError

logger = logging.getLogger(__name__)

LoraMode = Literal["merged", "adapter"]
"""How the engine applies a LoRA actor's pairs; see `SglJaxRollout`."""

LoraChoice = Literal["auto", "merged", "adapter"]
"""What a rollout is asked for; "auto" becomes one of the others."""

BaseHolder = Literal["the actor", "the rollout"]


class LoraReport(NamedTuple):
    """What a rollout knows about its actor's LoRA, and its memory cost.

    `base_bytes` are of the frozen base, which every update reads; quantised if the actor's is. Its
    holder is the actor, whose variables the rollout refers to, or the rollout, after
    `update_params` got a base other than the actor's.
    """

    mode: LoraMode
    num_pairs: int
    max_rank: int
    base_bytes: int
    base_holder: BaseHolder


_A, _B = "_lora_a", "_lora_b"


def check_lora_mode(mode: str) -> LoraChoice:
    modes = get_args(LoraChoice)
    if mode not in modes:
        raise InvalidConfigError(f"lora must be one of {modes}, got {mode!r}")
    return mode  # pyright: ignore[reportReturnType]


def check_scaling(name: str, value: Any) -> float | None:
    if value is None:
        return None
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise InvalidConfigError(f"{name} must be None or a finite number, got {value!r}")
    return float(value)


def is_lora_name(name: str) -> bool:
    """Whether a parameter is one of a pair, by its dotted name."""
    return name.endswith((_A, _B))


class _Pair(NamedTuple):
    path: tuple[Any, ...]
    module: nnx.Module
    weight: str

    @property
    def name(self) -> str:
        return ".".join(map(str, (*self.path, self.weight)))


def find_lora(actor: Any, scaling: float | None) -> LoraActor | None:
    """The pairs and base of a LoRA actor; None for a model without LoRA parameters.

    Without `scaling`, alpha / rank of all pairs is that of the actor's provider.
    """
    if not isinstance(actor, nnx.Module):
        return None
    pairs = list(_pairs(actor))
    if not pairs:
        return None
    wrapped = None if scaling is not None else _wrapped(actor)
    rules = tuple(
        LoraRule(
            pair.name,
            pair.name + _A,
            pair.name + _B,
            (_scale(pair, wrapped) if scaling is None else scaling) / _factor(pair),
            **_axes(pair),
        )
        for pair in pairs
    )
    ranks = {_shape(pair, _A)[-1] for pair in pairs}
    return LoraActor(rules, _base_variables(actor), _quantised(actor), max(ranks))


def _pairs(actor: nnx.Module) -> Iterator[_Pair]:
    for path, module in nnx.iter_modules(actor):
        for attribute in vars(module):
            if attribute.endswith(_A):
                yield _Pair(path, module, attribute.removesuffix(_A))


def _shape(pair: _Pair, suffix: str) -> tuple[int, ...]:
    leaf = getattr(pair.module, pair.weight + suffix, None)
    if leaf is None:
        raise InvalidConfigError(
            f"the actor has {pair.name + _A!r} but no {pair.name + suffix!r}: half a LoRA pair"
        )
    return tuple(leaf.shape)


# ------------------------------------------------------------------ scale


class _Wrapped(NamedTuple):
    """The module that qwix wrapped, which may be inside another, and the provider of its rules."""

    path: tuple[Any, ...]
    provider: qwix.LoraProvider


def _wrapped(actor: nnx.Module) -> _Wrapped | None:
    """The outermost wrapped module of an actor; in MaxText's adapter it is the model inside."""
    found = [
        _Wrapped(path, provider)
        for path, module in nnx.iter_modules(actor)
        if (provider := _provider(module)) is not None
    ]
    return min(found, key=lambda each: len(each.path), default=None)


def _provider(actor: nnx.Module) -> qwix.LoraProvider | None:
    """The provider whose rules the wrapped model follows; its call keeps it in a closure."""
    queue: list[Any] = [type(actor).__call__]
    seen: set[int] = set()
    while queue:
        found = queue.pop()
        if isinstance(found, qwix.LoraProvider):
            return found
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, functools.partial):
            queue += [found.func, *found.args, *found.keywords.values()]
        else:
            cells = getattr(found, "__closure__", None) or ()
            queue += [cell.cell_contents for cell in cells]
    return None


def _factor(pair: _Pair) -> float:
    """The factor on the module's weight, but not on its pair, before it uses them (Gemma 4)."""
    return getattr(pair.module, "w_scale", None) or 1.0


def _scale(pair: _Pair, wrapped: _Wrapped | None) -> float:
    """Alpha / rank of the first rule that matches a pair's module and operation, as in qwix."""
    prefix, provider = ((), None) if wrapped is None else wrapped
    where = "/".join(map(str, pair.path[len(prefix) :]))
    is_einsum = getattr(pair.module, f"{pair.weight}_lora_einsum_str", None) is not None
    operation = "einsum" if is_einsum else "dot_general"
    for rule in [] if provider is None else provider._rules:
        fits = re.fullmatch(rule.module_path, where) is not None
        if fits and (not rule.op_names or operation in rule.op_names):
            if isinstance(rule, qwix.LoraRule):
                return float(rule.alpha / rule.rank)
            break
    raise InvalidConfigError(
        f"nothing tells the scale (alpha / rank) of the LoRA pair of {pair.name!r}: set "
        "lora_scaling= of the rollout, or RolloutConfig.rollout_sglang_jax_lora_scaling, or give "
        "an actor that qwix.apply_lora_to_model made, whose rules tell it"
    )


# ------------------------------------------------------------------ axes


def _axes(pair: _Pair) -> dict[str, Any]:
    """The fields of a LoraRule that say which axes of the weight A and B have."""
    sizes = [getattr(pair.module, f"{side}_features_shape", None) for side in ("in", "out")]
    if sizes[0] is None or sizes[1] is None:
        return {"in_axes": _in_axes(pair)}
    return _dense_general_axes(pair, len(sizes[0]), len(sizes[1]))


def _dense_general_axes(pair: _Pair, num_in: int, num_out: int) -> dict[str, Any]:
    """The axes of a MaxText layer: inputs, then outputs, with those of a scan behind the first.

    A and B have one axis of inputs or outputs, and those of the scan.
    """
    shape = _weight_shape(pair)
    num_stacked = len(shape) - num_in - num_out
    stacked = tuple(range(1, 1 + num_stacked))
    others = [axis for axis in range(len(shape)) if axis not in stacked]
    sizes = [shape[axis] for axis in stacked]
    inputs = math.prod(shape[axis] for axis in others[:num_in])
    given = list(_shape(pair, _A)[:-1])
    if given != [inputs, *sizes]:
        raise InvalidConfigError(
            f"the LoRA A of {pair.name!r} {list(shape)} must be [{inputs}, "
            f"{''.join(f'{size}, ' for size in sizes)}rank], got {[*given, 'rank']}"
        )
    return {"in_axes": tuple(others[:num_in]), "stacked_axes": stacked, "is_merged": True}


def _in_axes(pair: _Pair) -> tuple[int, ...]:
    """Axes of the weight that A has: those the layer contracts with its input."""
    shape = _weight_shape(pair)
    inputs = list(_shape(pair, _A)[:-1])
    einsum = getattr(pair.module, "einsum_str", None)
    lora_einsum = getattr(pair.module, f"{pair.weight}_lora_einsum_str", None)
    if lora_einsum is None and len(shape) == 2:  # a kernel [in, out]
        return (0,)
    if isinstance(einsum, str) and isinstance(lora_einsum, str):
        axes = einsum.replace(" ", "").split("->")[0].split(",")[1]
        of_a = lora_einsum.replace(" ", "").split("->")[0].split(",")[1][:-1]
        return tuple(axis for axis, letter in enumerate(axes) if letter in of_a)
    fitting = [axes for axes in _subsets(len(shape)) if [shape[axis] for axis in axes] == inputs]
    if len(fitting) != 1:
        raise InvalidConfigError(
            f"the axes of {pair.name!r} {list(shape)} that its LoRA A {[*inputs, 'rank']} has "
            f"cannot be told: its module names no einsum, and {len(fitting)} choices fit"
        )
    return fitting[0]


def _subsets(size: int) -> list[tuple[int, ...]]:
    return [tuple(i for i in range(size) if bits >> i & 1) for bits in range(1, 1 << size)]


def _weight_shape(pair: _Pair) -> tuple[int, ...]:
    weight = getattr(pair.module, pair.weight)
    inner = getattr(weight, "array", None)  # from qwix's wrapper around a quantised weight
    return tuple(inner.qvalue.shape if isinstance(inner, qwix.QArray) else weight.shape)


# ------------------------------------------------------------------ the frozen base


def _base_variables(actor: nnx.Module) -> dict[str, nnx.Variable[Any]]:
    """The variables of the actor's parameters without its pairs, by dotted names."""
    state = nnx.state(actor, nnx.Param)
    flat = {".".join(map(str, key)): leaf for key, leaf in nnx.to_flat_state(state)}
    return {name: leaf for name, leaf in flat.items() if not is_lora_name(name)}


def _quantised(actor: nnx.Module) -> dict[str, Any]:
    """Qwix's logical type of each quantised weight, by the weight's dotted name."""
    found = {}
    for path, module in nnx.iter_modules(actor):
        for attribute, value in vars(module).items():
            inner = getattr(value, "array", None)
            if isinstance(inner, qwix.QArray):
                found[".".join(map(str, (*path, attribute)))] = inner.qtype
    return found


def _dequantised(named: Mapping[str, Any], types: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters with each quantised weight in floating point, under its own name."""
    out = {name: x for name, x in named.items() if not _is_inside(name, types)}
    for name, qtype in types.items():
        qvalue, scale, zero_point = (
            named.get(f"{name}.array.{part}") for part in ("qvalue", "scale", "zero_point")
        )
        if qvalue is not None and scale is not None:  # else the engine's plan names the missing one
            quantised = qwix.QArray(qvalue, scale, zero_point, qtype)
            out[name] = qwix.dequantize(jax.tree.map(in_device_memory, quantised))
    return out


def in_device_memory(x: Any) -> Any:
    """The array, moved to device memory if Tunix keeps it on the host (`offload_to_cpu`)."""
    if not isinstance(x, jax.Array):
        return x
    default = next(iter(x.sharding.device_set)).default_memory().kind
    if x.sharding.memory_kind == default:
        return x
    return jax.device_put(x, x.sharding.with_memory_kind(default))


def _is_inside(name: str, types: Mapping[str, Any]) -> bool:
    weight, is_wrapped, _ = name.rpartition(".array.")
    return bool(is_wrapped) and weight in types


class LoraActor:
    """A LoRA actor's pairs as rules, and its frozen base.

    The base is read from the actor's own variables when needed: they always hold the trainer's
    current arrays, wherever it moves them, so there is no second copy. Tunix's trainers donate only
    optimizer state. Not thread-safe; updates of a rollout come one at a time.
    """

    def __init__(
        self,
        rules: Sequence[LoraRule],
        variables: Mapping[str, nnx.Variable[Any]],
        quantised: Mapping[str, Any],
        max_rank: int,
    ) -> None:
        self.rules = tuple(rules)
        self.max_rank = max_rank
        self._factors = {name for rule in rules for name in (rule.a, rule.b)}
        self._variables = dict(variables)
        self._quantised = dict(quantised)
        self._given: dict[str, Any] | None = None  # a base other than the actor's
        self._pairs: dict[str, Any] = {}
        self._pending: tuple[dict[str, Any] | None, dict[str, Any]] = None, {}

    @property
    def weights(self) -> list[str]:
        return [rule.weight for rule in self.rules]

    @property
    def stored_dtype(self) -> str:
        """Dtype of the frozen base's weights; of those that are not quantised."""
        named = self._own()
        return str(
            next(x.dtype for name, x in named.items() if not _is_inside(name, self._quantised))
        )

    def check_factors_alone(self) -> None:
        """Refuses pairs that can only be merged into their weights."""
        for rule in self.rules:
            if rule.stacked_axes or rule.is_merged:
                raise InvalidConfigError(
                    f"lora='adapter' cannot serve {rule.weight!r}: MaxText's pairs have one axis "
                    "for several heads, or for all layers; take lora='merged'"
                )

    @property
    def brings_base(self) -> bool:
        """Whether the last completed parameters have a base other than the actor's."""
        return self._pending[0] is not None

    def accept(self) -> None:
        """Records that the last completed parameters serve; they complete later ones."""
        self._given, self._pairs = self._pending

    def report(self, mode: LoraMode) -> LoraReport:
        holder: BaseHolder = "the actor" if self._given is None else "the rollout"
        num_bytes = sum(int(x.nbytes) for x in self._base().values())
        return LoraReport(mode, len(self.rules), self.max_rank, num_bytes, holder)

    def complete(self, named: Mapping[str, Any], *, with_base: bool = True) -> dict[str, Any]:
        """Completes parameters that may be all, only LoRA leaves, or only a base.

        Missing parts come from the actor's base and the pairs accepted last. A given base other
        than the actor's is kept once it is accepted. A quantised base is returned in floating
        point.
        """
        pairs = {name: x for name, x in named.items() if is_lora_name(name)}
        base = {name: x for name, x in named.items() if name not in pairs}
        pairs = pairs or self._pairs
        problems = [f"{name!r} belongs to no LoRA pair" for name in pairs.keys() - self._factors]
        problems += [f"{name!r} is missing" for name in self._factors - pairs.keys()]
        if problems:
            raise WeightSyncError(
                f"LoRA parameters are not those of the actor ({len(problems)} problem(s)):\n  "
                + "\n  ".join(sorted(problems))
            )
        given = self._given
        if not base and not with_base:
            self._pending = given, pairs
            return pairs
        if base:
            own = self._own()
            is_own = base.keys() == own.keys() and all(base[name] is own[name] for name in own)
            given = None if is_own else base
        base = self._own() if given is None else given
        deleted = [n for n, x in base.items() if isinstance(x, jax.Array) and x.is_deleted()]
        if deleted:
            raise WeightSyncError(
                f"the frozen base of the LoRA actor was deleted or donated: {deleted[0]!r} and "
                f"{len(deleted) - 1} more"
            )
        self._pending = given, pairs
        if self._quantised:
            # On a separate thread: Tunix's transfer guards are thread-local, and forbid constants.
            with ThreadPoolExecutor(1) as pool:
                base = pool.submit(_dequantised, base, self._quantised).result()
        return base | {name: pairs[name] for name in sorted(pairs)}

    def _base(self) -> dict[str, Any]:
        return self._own() if self._given is None else self._given

    def _own(self) -> dict[str, Any]:
        return {name: variable.get_value() for name, variable in self._variables.items()}
