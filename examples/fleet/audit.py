"""Whether each row that a fleet sampled is trained once, with the weights that it should have."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from tunix.rl.rl_cluster import RLCluster
from tunix.rl.rollout.base_rollout import RolloutConfig, RolloutOutput

from tunix_sgljax import SglJaxRollout, VersionedRolloutOutput
from tunix_sgljax.in_flight.wrapping import RolloutWrapper

Row = tuple[bytes, bytes]


@dataclasses.dataclass
class Audit:
    """Rows that came from the rollout and rows that went into the trainer, by their contents.

    Attributes:
        sampled: How often each row was sampled: two completions may be equal.
        trained: How often each was trained.
        wrong_versions: Rows whose tokens are not all of the newest weights.
        replicas: How many rows each worker sampled.
    """

    sampled: collections.Counter[Row] = dataclasses.field(default_factory=collections.Counter)
    trained: collections.Counter[Row] = dataclasses.field(default_factory=collections.Counter)
    wrong_versions: int = 0
    replicas: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    @property
    def num_rows(self) -> int:
        """Rows that were trained."""
        return self.trained.total()

    @property
    def num_trained_twice(self) -> int:
        """Rows that were trained more often than they were sampled."""
        return (self.trained - self.sampled).total()

    @property
    def num_lost(self) -> int:
        """Rows that were sampled and not trained."""
        return (self.sampled - self.trained).total()

    def add_sampled(self, prompts: np.ndarray, completions: Sequence[np.ndarray], pad: int) -> None:
        """Counts rows of a rollout: left-padded prompts, and completions."""
        for prompt, completion in zip(prompts, completions, strict=True):
            self.sampled[_row(prompt[prompt != pad], np.asarray(completion))] += 1

    def add_trained(self, example: Any) -> None:
        """Counts the rows of Tunix's TrainExample."""
        prompts, completions = np.asarray(example.prompt_ids), np.asarray(example.completion_ids)
        masks = np.asarray(example.prompt_mask, bool), np.asarray(example.completion_mask, bool)
        for prompt, completion, is_prompt, is_sampled in zip(
            prompts, completions, *masks, strict=True
        ):
            self.trained[_row(prompt[is_prompt], completion[is_sampled])] += 1


def _row(prompt: np.ndarray, completion: np.ndarray) -> Row:
    return prompt.astype(np.int32).tobytes(), completion.astype(np.int32).tobytes()


class AuditedRollout(RolloutWrapper):
    """A rollout whose rows are counted."""

    def __init__(self, inner: SglJaxRollout, audit: Audit) -> None:
        """Wraps a rollout, of a fleet or embedded."""
        super().__init__(inner)
        self._sampler, self._audit = inner, audit

    def generate(
        self, prompts: list[str], rollout_config: RolloutConfig, **kwargs: Any
    ) -> RolloutOutput:
        """Samples, and counts what came."""
        output = super().generate(prompts, rollout_config, **kwargs)
        assert isinstance(output, VersionedRolloutOutput)
        self._audit.add_sampled(output.left_padded_prompt_tokens, output.tokens, self.pad_id())
        self._audit.replicas.update(filter(None, output.replica_ids or ()))
        # The learner is synchronous: nothing is updated while it samples.
        newest = self._sampler.weight_version
        for versions in output.weight_versions:
            self._audit.wrong_versions += bool(np.any(versions != newest))
        return output


class AuditedCluster(RLCluster):
    """Tunix's cluster whose trained rows are counted."""

    audit: Audit

    def update_actor(self, train_ds: Any, eval_ds: Any, skip_jit: bool = False) -> None:
        """Trains, and counts what it trains on."""
        super().update_actor(self._counted(train_ds), eval_ds, skip_jit)

    def _counted(self, examples: Iterable[Any]) -> Iterator[Any]:
        for example in examples:
            self.audit.add_trained(example)
            yield example
