"""The addition task: problems, tokenizer, reward, model, and its checkpoint.

The policy is asked `Q: 37+58= A:` and writes its scratchpad, column by column from the right with
the carry, and then the sum: `7+8=15,3+5+1=9,95`. Only the sum is rewarded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grain
import jax
import numpy as np
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import save_file
from tunix.models.qwen3 import model as qwen3

from char_tokenizer import Tokenizer

MAX_PROMPT_LENGTH = 16
MAX_NEW_TOKENS = 40
MAX_DIGITS = 3

_PROMPT = re.compile(r"Q: (\d+)\+(\d+)= A:")


class Problem(NamedTuple):
    """Two numbers to add."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        """What the policy is asked."""
        return f"Q: {self.left}+{self.right}= A:"

    @property
    def answer(self) -> str:
        """The sum, in digits."""
        return str(self.left + self.right)

    @property
    def scratchpad(self) -> str:
        """The addition of each column, from the right, with the carry."""
        columns = []
        carry = 0
        left, right = self.left, self.right
        while left or right or not columns:
            terms = [left % 10, right % 10] + ([1] if carry else [])
            columns.append(f"{'+'.join(map(str, terms))}={sum(terms)}")
            carry = sum(terms) // 10
            left, right = left // 10, right // 10
        return ",".join(columns)

    @property
    def solution(self) -> str:
        """A perfect completion."""
        return f"{self.scratchpad},{self.answer}"

    @classmethod
    def parse(cls, prompt: str) -> Problem:
        """Returns the problem that `prompt` asks.

        Raises:
            ValueError: It is not a prompt of this task.
        """
        match = _PROMPT.fullmatch(prompt)
        if match is None:
            raise ValueError(f"not a prompt of the addition task: {prompt!r}")
        return cls(int(match[1]), int(match[2]))


def sample_problem(rng: np.random.Generator) -> Problem:
    """Returns a problem whose numbers have one to three digits, each length as likely."""
    left, right = (int(rng.integers(10 ** rng.integers(1, MAX_DIGITS + 1))) for _ in range(2))
    return Problem(left, right)


def problem_rows(num: int, seed: int) -> list[dict[str, str]]:
    """Returns rows for the config's `task.dataset`: a prompt and its answer in each."""
    rng = np.random.default_rng(seed)
    problems = [sample_problem(rng) for _ in range(num)]
    return [{"prompts": problem.prompt, "answer": problem.answer} for problem in problems]


def held_out_rows(num: int, seed: int, num_train: int, train_seed: int) -> list[dict[str, str]]:
    """`problem_rows` of which none is among those of a training set; at most `num` of them."""
    seen = {row["prompts"] for row in problem_rows(num_train, train_seed)}
    rows = {row["prompts"]: row for row in problem_rows(2 * num, seed)}
    return [row for prompt, row in rows.items() if prompt not in seen][:num]


def problem_batches(num_batches: int, batch_size: int, seed: int) -> grain.MapDataset:
    """Returns batches for Tunix's `GRPOLearner`: arrays of `prompts` and of each one's `answer`."""
    return batches_of(sample_problem, num_batches, batch_size, seed)


def batches_of(
    sample: Callable[[np.random.Generator], Any], num_batches: int, batch_size: int, seed: int
) -> grain.MapDataset:
    """`problem_batches` of a task whose problems, with `prompt` and `answer`, `sample` draws."""
    rng = np.random.default_rng(seed)
    problems = [sample(rng) for _ in range(num_batches * batch_size)]
    return (
        grain.MapDataset.source(problems)
        .map(lambda problem: {"prompts": problem.prompt, "answer": problem.answer})
        .batch(batch_size)
    )


def exact_match(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **_: Any
) -> list[float]:
    """Tunix reward function: 1 where the completion ends with the right sum, else 0.

    Args:
        prompts: What was asked; not needed.
        completions: What the policy wrote, without special tokens.
        answer: The right sums, one for each completion.
        **_: The other columns and settings that Tunix passes to every reward function.

    Returns:
        The rewards, one for each completion.
    """
    del prompts
    return [
        float(completion.rpartition(",")[2] == right)
        for completion, right in zip(completions, answer, strict=True)
    ]


def model_config() -> qwen3.ModelConfig:
    """Returns the policy's shape: a Qwen3 of 2.4 million parameters."""
    return qwen3.ModelConfig(
        num_layers=4,
        vocab_size=Tokenizer.vocab_size,
        embed_dim=256,
        hidden_dim=512,
        num_heads=8,
        num_kv_heads=4,
        head_dim=32,
        norm_eps=1e-6,
        rope_theta=1_000_000,
        use_tied_embedding=True,
    )


def new_model(seed: int, config: qwen3.ModelConfig | None = None) -> qwen3.Qwen3:
    """Returns an untrained policy, of the shape in `config` or else in `model_config()`.

    Tunix sets the kernels of a Qwen3's MLPs to zero, since it expects to load a checkpoint. Zero
    kernels have zero gradients and would stay zero for ever, so they are drawn here.
    """
    rngs = nnx.Rngs(seed)
    model = qwen3.Qwen3(config or model_config(), rngs=rngs)
    init = nnx.initializers.lecun_normal()
    for layer in model.layers:
        for linear in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj):
            linear.kernel[...] = init(rngs.params(), linear.kernel.shape, linear.kernel.dtype)
    return model


def save_checkpoint(path: Path, model: qwen3.Qwen3, metadata: Mapping[str, str]) -> None:
    """Writes the parameters to a safetensors file, rounded to float16, with `metadata`."""
    params = nnx.to_flat_state(nnx.state(model, nnx.Param))
    arrays = {_name(key): np.asarray(param[...], np.float16) for key, param in params}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(arrays, path, dict(metadata))


def load_checkpoint(
    path: Path, mesh: jax.sharding.Mesh, config: qwen3.ModelConfig | None = None
) -> qwen3.Qwen3:
    """Returns the policy in the safetensors file, in float32.

    Args:
        path: What `save_checkpoint` wrote.
        mesh: Where to put the parameters, with Tunix's axes `fsdp` and `tp`.
        config: The policy's shape; None takes `model_config()`.

    Raises:
        ValueError: The file does not hold exactly the parameters of this policy.
    """
    model = nnx.eval_shape(lambda: qwen3.Qwen3(config or model_config(), rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(model)
    params = {_name(key): param for key, param in nnx.to_flat_state(state)}
    shardings = nnx.to_flat_state(nnx.get_named_sharding(state, mesh))
    with safe_open(path, framework="numpy") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    shapes = {name: array.shape for name, array in stored.items()}
    if shapes != {name: param.shape for name, param in params.items()}:
        raise ValueError(f"{path} does not hold the parameters of the addition policy: {shapes}")
    for key, sharding in shardings:
        param = params[_name(key)]
        array = stored[_name(key)].astype(param.dtype)
        param.set_value(jax.device_put(array, sharding.get_value()))
    return nnx.merge(graphdef, state)


def checkpoint_metadata(path: Path) -> dict[str, str]:
    """Returns how the checkpoint was made, as its maker wrote it."""
    with safe_open(path, framework="numpy") as file:
        return dict(file.metadata())


def _name(key: Sequence[Any]) -> str:
    return ".".join(map(str, key))
