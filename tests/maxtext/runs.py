"""Runs `tunix-sgljax maxtext rl` in this process and keeps what a test looks at."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx
from tunix.rl.rl_cluster import RLCluster

from tests import inside
from tests.maxtext import recipe, task
from tunix_sgljax import MismatchReport, SglJaxRollout, mismatch_report
from tunix_sgljax.cli import main as cli


@dataclasses.dataclass
class Run:
    """What was seen of a run.

    Attributes:
        clusters: The clusters that MaxText's trainer made.
        texts: Completions of each call of the rollout.
        differing: After each sync, names of the engine's weights that are not the trainer's.
        num_engines: Engines of the rollout, one for each submesh.
        report: How far the engine's log-probs are from the trainer's at the end, if asked for.
    """

    clusters: list[Any] = dataclasses.field(default_factory=list)
    texts: list[list[str]] = dataclasses.field(default_factory=list)
    differing: list[list[str]] = dataclasses.field(default_factory=list)
    num_engines: int = 0
    report: MismatchReport | None = None

    @property
    def rollout(self) -> SglJaxRollout:
        """The rollout of the only cluster."""
        (cluster,) = self.clusters
        return cluster.rollout

    @property
    def actor(self) -> Any:
        """The trained model."""
        return self.clusters[0].actor_trainer.model

    @property
    def rewards(self) -> np.ndarray:
        """The mean reward of each call of the rollout."""
        return np.asarray([np.mean(task.share_of_e(None, texts, None)) for texts in self.texts])


@contextmanager
def watched(patch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Watches clusters, completions and syncs; closes rollouts at the end."""
    run = Run()
    init, generate, update = RLCluster.__init__, SglJaxRollout.generate, SglJaxRollout.update_params

    def watched_init(self: Any, *args: Any, **kwargs: Any) -> None:
        run.clusters.append(self)
        init(self, *args, **kwargs)

    def watched_generate(self: Any, prompts: Any, *args: Any, **kwargs: Any) -> Any:
        output = generate(self, prompts, *args, **kwargs)
        run.texts.append(list(output.text))
        return output

    def watched_update(self: Any, params: Any, *args: Any, **kwargs: Any) -> None:
        update(self, params, *args, **kwargs)
        run.differing.append(self.find_differing_weights(params))

    patch.setattr(RLCluster, "__init__", watched_init)
    patch.setattr(SglJaxRollout, "generate", watched_generate)
    patch.setattr(SglJaxRollout, "update_params", watched_update)
    try:
        yield run
    finally:
        for cluster in run.clusters:
            if hasattr(cluster, "_rollout"):
                cluster.rollout.close()


def command(
    folder: Path,
    num_steps: int,
    *overrides: str,
    without: Collection[str] = (),
    report_on: Sequence[str] = (),
) -> Run:
    """Runs the command to its end, with an error of its own if it fails.

    Args:
        folder: For files and results.
        num_steps: Steps of training.
        *overrides: As in `recipe.words`.
        without: As in `recipe.words`.
        report_on: Prompts for a `Run.report`, whose samples are not among the run's texts.
    """
    with pytest.MonkeyPatch.context() as patch, watched(patch) as run:
        argv = ["maxtext", "rl", *recipe.words(folder, num_steps, *overrides, without=without)]
        # Not `main`, which would make a line of text of an error.
        assert cli.find_command("maxtext").run(cli.make_parser(argv).parse_args(argv)) == 0
        run.num_engines = len(inside.loops(run.rollout.engine))
        assert run.rollout.find_differing_weights(nnx.state(run.actor, nnx.Param)) == []
        if report_on:
            run.report = mismatch_report(run.rollout, run.actor, report_on)
            run.texts.pop()
    return run
