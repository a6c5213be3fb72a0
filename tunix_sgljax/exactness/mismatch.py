"""Compares a rollout's log-probs with those of Tunix's trainer for the same tokens."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from tunix.rl.rollout.base_rollout import RolloutConfig

from sgljax_engine import InvalidRequestError
from tunix_sgljax import padding
from tunix_sgljax.exactness.lora_effect import LoraEffect
from tunix_sgljax.exactness.trainer_match import trainer_logps
from tunix_sgljax.maxtext.known_faults import padding_fault
from tunix_sgljax.model_config import coarser_dtype, compute_dtype, config_of
from tunix_sgljax.rollout import SglJaxRollout

TOLERANCES = {"float32": 1e-4, "bfloat16": 0.25, "int8": 1.0}
"""Differences in a token's log-prob that rounding alone explains, by dtype.

In float32, some ten times what `benchmarks/exactness/mismatch.py` measures with 8 layers. In
bfloat16, two steps of 1/8, the distance of values from 16 to 32: Tunix's models round their logits
to bfloat16, so a logit may land a step away on either side. With small logits a tenth of this was
measured. Dtypes other than float32 and float64 use bfloat16's tolerance. "int8" is for keys and
values: 1,536 tokens of SmolLM2-135M differed by 0.41 at most.
"""

QUANTILES = (0.0, 0.01, 0.5, 0.99, 1.0)
"""Reported quantiles of the importance ratios."""

SEQUENCE_BOUNDS = (0.999, 1.002)
"""Bounds of a sequence's mean importance ratio within which sequence-level masks keep it."""


class WorstToken(NamedTuple):
    """The token whose log-probs differ most, at its prompt's row and place in the completion."""

    row: int
    position: int
    token_id: int
    sampler: float
    trainer: float


class PaddingEffect(NamedTuple):
    """What the padding in front of a prompt does to the trainer's log-probs of its row.

    Attributes:
        row: The row that is off by most among those with padding.
        with_padding, without: The largest difference between sampler and trainer there, in the
            trainer's batch, and when the trainer scores the same tokens without the padding.
        fault: A known reason in the trainer's model; "" if there is none.
    """

    row: int
    with_padding: float
    without: float
    fault: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Statistics:
    """Statistics of the differences of some tokens.

    Attributes:
        num_tokens: Number of tokens.
        max_abs, mean_abs: Largest and mean absolute difference.
        k1: Mean of the sampler's minus the trainer's log-prob; estimates KL(sampler || trainer).
        k3: Mean of r - 1 - log r of the importance ratio r = exp(trainer - sampler): the same KL
            with less variance and never negative (Schulman, 2020).
        ratio_quantiles: Quantiles of r, at `QUANTILES`.
    """

    num_tokens: int
    max_abs: float
    mean_abs: float
    k1: float
    k3: float
    ratio_quantiles: np.ndarray

    @classmethod
    def of(cls, sampler: np.ndarray, trainer: np.ndarray) -> Statistics:
        """Statistics of two log-probs of the same tokens, float64 [N]. NaN stays NaN."""
        if not sampler.size:
            nan = float("nan")
            return cls(
                num_tokens=0,
                max_abs=nan,
                mean_abs=nan,
                k1=nan,
                k3=nan,
                ratio_quantiles=np.full(len(QUANTILES), nan),
            )
        log_ratio = trainer - sampler
        ratio = np.exp(log_ratio)
        return cls(
            num_tokens=sampler.size,
            max_abs=float(np.abs(log_ratio).max()),
            mean_abs=float(np.abs(log_ratio).mean()),
            k1=float((sampler - trainer).mean()),
            k3=float((np.expm1(log_ratio) - log_ratio).mean()),
            ratio_quantiles=np.quantile(ratio, QUANTILES),
        )

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"ratio_quantiles": self.ratio_quantiles.tolist()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MismatchReport:
    """Log-probs of the same tokens by rollout and trainer, and statistics of their differences.

    Tokens that equal the pad id are not compared: Tunix masks them. The trainer, but not the
    engine, also hides them from later tokens, so those differ; see `pad_rows`. The same holds for
    pad ids inside a prompt; see `prompt_pad_rows`.

    Attributes:
        tokens: Sampled token ids, padded; int32.
        sampler, trainer: Log-probs of the tokens; 0 where nothing is compared. float32.
        is_compared: Which tokens are compared.
        weight_versions: Weight versions that sampled the tokens, ascending.
        dtype: The coarser dtype of rollout and trainer; the tolerance follows it.
        kv_dtype: Dtype of keys and values in the rollout's pages; the tolerance follows "int8" too.
        logprobs_mode: The rollout's mode.
        temperature: Temperature of both.
        pad_rows: Rows in which the pad id was sampled, ascending.
        prompt_pad_rows: Rows whose prompt has the pad id after another token, ascending.
        padding: Set if a row is off and the padding in front of its prompt is why: the trainer's
            own log-probs change by more than the tolerance when it is taken away.
        lora: What the rollout's dtype leaves of the trainer's LoRA pairs; see
            `SglJaxRollout.lora_effect`.

    Shape:
        tokens, sampler, trainer, is_compared: [B, C].
    """

    tokens: np.ndarray
    sampler: np.ndarray
    trainer: np.ndarray
    is_compared: np.ndarray
    weight_versions: tuple[int, ...]
    dtype: str
    logprobs_mode: str
    temperature: float
    pad_rows: tuple[int, ...]
    prompt_pad_rows: tuple[int, ...] = ()
    padding: PaddingEffect | None = None
    lora: LoraEffect | None = None
    kv_dtype: str = "float32"

    @property
    def difference(self) -> np.ndarray:
        """Absolute differences; 0 where nothing is compared. float64 [B, C]."""
        sampler, trainer = self.sampler.astype(np.float64), self.trainer.astype(np.float64)
        return np.where(self.is_compared, np.abs(sampler - trainer), 0.0)

    @property
    def overall(self) -> Statistics:
        """Statistics of all tokens."""
        kept = self.is_compared
        sampler, trainer = self.sampler[kept], self.trainer[kept]
        return Statistics.of(sampler.astype(np.float64), trainer.astype(np.float64))

    @property
    def sequence_ratios(self) -> np.ndarray:
        """The geometric mean of each row's importance ratios; 1 where none is compared. [B]."""
        sampler, trainer = self.sampler.astype(np.float64), self.trainer.astype(np.float64)
        total = np.where(self.is_compared, trainer - sampler, 0.0).sum(axis=1)
        return np.exp(total / np.maximum(self.is_compared.sum(axis=1), 1))

    def share_outside(
        self, low: float = SEQUENCE_BOUNDS[0], high: float = SEQUENCE_BOUNDS[1]
    ) -> float:
        """The share of sequences that a mask with these bounds of `sequence_ratios` leaves out."""
        ratios = self.sequence_ratios
        return float(1 - ((ratios >= low) & (ratios <= high)).mean())

    @property
    def worst(self) -> WorstToken:
        """The token that differs most; NaN counts as the largest difference."""
        gaps = np.where(np.isnan(self.difference), np.inf, self.difference)
        gaps = np.where(self.is_compared, gaps, -1.0)
        row, at = np.unravel_index(int(gaps.argmax()), gaps.shape)
        return WorstToken(
            row=int(row),
            position=int(at),
            token_id=int(self.tokens[row, at]),
            sampler=float(self.sampler[row, at]),
            trainer=float(self.trainer[row, at]),
        )

    @property
    def _dtypes(self) -> str:
        """Both dtypes, for readers."""
        if self.kv_dtype != "int8":
            return self.dtype
        return f"{self.dtype} with keys and values in {self.kv_dtype}"

    @property
    def default_tolerance(self) -> float:
        """The tolerance of the dtypes, from `TOLERANCES`."""
        if self.kv_dtype == "int8":
            return TOLERANCES["int8"]
        return TOLERANCES["float32" if self.dtype in ("float32", "float64") else "bfloat16"]

    def is_within(self, tolerance: float | None = None) -> bool:
        """Whether no token differs by more than a tolerance.

        Args:
            tolerance: Tolerance of log-probs; None takes the dtype's default, which rounding
                explains.
        """
        return not self.rows_off(tolerance)

    def rows_off(self, tolerance: float | None = None) -> dict[int, int]:
        """Rows with a token that differs by more than a tolerance.

        Returns:
            The position of the first such token by row.
        """
        limit = self.default_tolerance if tolerance is None else tolerance
        is_off = ~(self.difference <= limit)  # NaN is off
        return {int(row): int(is_off[row].argmax()) for row in np.flatnonzero(is_off.any(axis=1))}

    def to_dict(self) -> dict[str, Any]:
        """The numbers of `str`, for JSON."""
        return {
            "dtype": self.dtype,
            "kv_dtype": self.kv_dtype,
            "logprobs_mode": self.logprobs_mode,
            "temperature": self.temperature,
            "weight_versions": list(self.weight_versions),
            "tolerance": self.default_tolerance,
            "is_within": self.is_within(),
            "rows_off": {str(row): at for row, at in self.rows_off().items()},
            "pad_rows": list(self.pad_rows),
            "prompt_pad_rows": list(self.prompt_pad_rows),
            "padding": None if self.padding is None else self.padding._asdict(),
            "lora": None if self.lora is None else self.lora._asdict(),
            "quantiles": list(QUANTILES),
            "overall": self.overall.to_dict(),
            "sequence_ratios": self.sequence_ratios.tolist(),
            "share_outside": self.share_outside(),
            "worst": self.worst._asdict(),
        }

    def __str__(self) -> str:
        all_tokens, worst, off = self.overall, self.worst, self.rows_off()
        sequences = self.sequence_ratios
        ratios = "  ".join(f"{ratio:.6f}" for ratio in all_tokens.ratio_quantiles)
        verdict = "within" if not off else "BEYOND"
        lines = [
            f"{all_tokens.num_tokens} tokens of {len(self.tokens)} rows, {self._dtypes}, "
            f"logprobs_mode={self.logprobs_mode}, temperature={self.temperature:g}, "
            f"weight versions {', '.join(map(str, self.weight_versions)) or 'none'}",
            f"  {verdict} the tolerance of {self.default_tolerance:g}",
            f"  |difference|      max {all_tokens.max_abs:.3e}   mean {all_tokens.mean_abs:.3e}",
            f"  KL estimates      k1 {all_tokens.k1:+.3e}   k3 {all_tokens.k3:.3e}",
            f"  importance ratio  {ratios}  (min, 1 %, 50 %, 99 %, max)",
            f"  sequence ratios   {sequences.min():.6f} to {sequences.max():.6f}, "
            f"{self.share_outside():.1%} outside [{SEQUENCE_BOUNDS[0]}, {SEQUENCE_BOUNDS[1]}]",
            f"  worst token       row {worst.row}, position {worst.position}, id {worst.token_id}: "
            f"sampler {worst.sampler:.6f}, trainer {worst.trainer:.6f}",
        ]
        if self.lora is not None:
            mode, correlation, ratio = self.lora
            lines.append(
                f"  LoRA pairs        {mode}: the change of the weights has correlation "
                f"{correlation:.3f} and norm ratio {ratio:.3f} with the exact one"
            )
        if off:
            shown = [f"row {row} from position {at}" for row, at in list(off.items())[:8]]
            more = f", and {len(off) - 8} more" if len(off) > 8 else ""
            lines.append(f"  off               {', '.join(shown)}{more}")
        for what, rows in (
            ("pad id sampled   ", self.pad_rows),
            ("pad id in prompt ", self.prompt_pad_rows),
        ):
            if rows:
                lines.append(
                    f"  {what} in rows {list(rows)}: the trainer hides it from the tokens behind it"
                )
        if self.padding is not None:
            row, with_padding, without, fault = self.padding
            lines.append(
                f"  padding           row {row}: off by {with_padding:.3e}, without the padding in "
                f"front of its prompt by {without:.3e}: padding enters the trainer's log-probs"
            )
            if fault:
                lines.append(f"                    {fault}")
        return "\n".join(lines)


def mismatch_report(
    rollout: SglJaxRollout,
    trainer_model: nnx.Module,
    prompts: Sequence[str],
    *,
    rollout_config: RolloutConfig | None = None,
    batch_size: int | None = None,
) -> MismatchReport:
    """Samples with the rollout and scores the same tokens as Tunix's trainer does.

    If the rollout has the weights of `trainer_model`, only rounding differs. A corrupt weight, a
    wrong position, stale keys or a missed update shows as tokens beyond the tolerance.

    Args:
        rollout: The rollout; its weights are not changed.
        trainer_model: A Tunix model with the weights that the rollout should have.
        prompts: Texts.
        rollout_config: Sampling settings; None takes the rollout's training config.
            `return_logprobs` is always set.
        batch_size: Rows that the trainer scores together; None scores all. With sampling replay the
            log-probs of both sides are those over the tokens that were sampled from.

    Returns:
        The comparison; filters such as top_k only decide which tokens are drawn.

    Raises:
        InvalidConfigError: when the rollout's `logprobs_mode` gives log-probs that no trainer
            computes.
        InvalidRequestError: as `SglJaxRollout.generate`, or for a batch_size below 1.
    """
    config = rollout.rollout_config if rollout_config is None else rollout_config
    config = dataclasses.replace(config, return_logprobs=True)
    rollout.check_comparable(config)
    if batch_size is not None and batch_size < 1:
        raise InvalidRequestError(f"batch_size must be None or >= 1, got {batch_size}")
    output = rollout.generate(list(prompts), config)
    assert output.logprobs is not None
    pad_id, width = rollout.pad_id(), config.max_tokens_to_generate
    tokens_BC = padding.right_pad(output.tokens, width, pad_id)
    graphdef, state = nnx.split(trainer_model)
    masks_BCN = None
    if output.sampling_masks is not None:
        size = max((len(mask) for row in output.sampling_masks for mask in row), default=1)
        masks_BCN = padding.pad_masks(output.sampling_masks, width, size)
    prompts_BP = np.asarray(output.left_padded_prompt_tokens)
    score = functools.partial(
        trainer_logps,
        graphdef,
        state,
        pad_id=pad_id,
        eos_id=rollout.eos_id(),
        temperature=config.temperature,
        batch_size=batch_size,
        masks_BCN=masks_BCN,
    )
    trainer_BC = score(prompts_BP, tokens_BC)
    lengths_B = np.array([len(row) for row in output.tokens])
    is_sampled = np.arange(width)[None] < lengths_B[:, None]
    is_compared = is_sampled & (tokens_BC != pad_id)
    sampled = [np.asarray(row, np.float32) for row in output.logprobs]
    report = MismatchReport(
        tokens=tokens_BC,
        sampler=np.where(is_compared, padding.spread(sampled, is_sampled), np.float32(0)),
        trainer=np.where(is_compared, trainer_BC, np.float32(0)),
        is_compared=is_compared,
        weight_versions=tuple(sorted({int(v) for row in output.weight_versions for v in row})),
        dtype=coarser_dtype(rollout.dtype, _computed_dtype(trainer_model, graphdef, state)),
        logprobs_mode=rollout.logprobs_mode,
        temperature=config.temperature,
        pad_rows=_rows_with(pad_id, output.tokens),
        prompt_pad_rows=_rows_with(pad_id, padding.unpad_prompts(prompts_BP, pad_id)),
        lora=rollout.lora_effect(nnx.state(trainer_model, nnx.Param)),
        kv_dtype=rollout.kv_dtype,
    )
    effect = None
    if masks_BCN is None:  # else a row can be scored only in its place
        effect = _padding_effect(report, prompts_BP, pad_id, score)
    if effect is None:
        return report
    fault = padding_fault(config_of(trainer_model)) or ""
    return dataclasses.replace(report, padding=effect._replace(fault=fault))


def _padding_effect(
    report: MismatchReport, prompts_BP: np.ndarray, pad_id: int, score: Callable[..., np.ndarray]
) -> PaddingEffect | None:
    """What padding does to the worst row that has some; None if no padded row is off, or little."""
    rows = [row for row in report.rows_off() if prompts_BP[row, 0] == pad_id]
    if not rows:
        return None
    row = max(rows, key=lambda row: report.difference[row].max())
    # As many rows as before, so that a mesh divides them.
    ids_BP = np.tile(
        padding.unpad_prompts(prompts_BP[row : row + 1], pad_id)[0], (len(prompts_BP), 1)
    )
    alone = score(ids_BP, np.tile(report.tokens[row], (len(prompts_BP), 1)))[0]
    kept = report.is_compared[row]
    change = np.abs(alone - report.trainer[row])[kept].max()
    if not change > report.default_tolerance:
        return None
    without = np.abs(alone - report.sampler[row])[kept].max()
    return PaddingEffect(row, float(report.difference[row].max()), float(without), "")


def _rows_with(pad_id: int, rows: Sequence[np.ndarray]) -> tuple[int, ...]:
    return tuple(row for row, ids in enumerate(rows) if (ids == pad_id).any())


def _computed_dtype(model: nnx.Module, graphdef: Any, state: Any) -> str:
    """The dtype in which a Tunix model computes, which may differ from that of its weights.

    It comes from the config or from the logits, which some models cast to float32 at the end.
    """
    # Two tokens: Tunix's Gemma 4 takes one for a decode step, which needs a cache.
    ids_BT = jax.ShapeDtypeStruct((1, 2), np.int32)
    mask_BTS = jax.ShapeDtypeStruct((1, 2, 2), np.bool_)

    def logits(state: Any, ids_BT: Any, mask_BTS: Any) -> Any:
        model = nnx.merge(graphdef, state)
        # Called like in Tunix's own function, which does not return the logits in every release.
        return model(ids_BT, positions=ids_BT, cache=None, attention_mask=mask_BTS)[0]

    dtype = np.dtype(jax.eval_shape(logits, state, ids_BT, mask_BTS).dtype).name
    return coarser_dtype(dtype, compute_dtype(config_of(model)) or dtype)
