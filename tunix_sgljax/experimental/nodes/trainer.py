"""A trainer node of Tunix's distributed RL, whose weights go through a folder."""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import optax
from tunix.experimental.train import peft_trainer_v2  # pyright: ignore[reportMissingImports]
from tunix.experimental.worker.trainer_worker import (  # pyright: ignore[reportMissingImports]
    TrainerWorker,
)

from tunix_sgljax.experimental.artifacts import WeightFolderWriter
from tunix_sgljax.experimental.nodes import serving


def main(argv: Sequence[str], context: Any = None) -> None:
    """Runs the node until it is interrupted; the entry point of Tunix's launcher.

    It is Tunix's own trainer; before each sync it writes the actor's weights into
    `--weight_folder`, from which samplers without a transport read them.
    """
    serving.check_context(context)
    parser = serving.make_parser(
        "Trainer node that syncs through a folder", port=20000, worker_id="trainer-0"
    )
    parser.add_argument("--weight_folder", required=True, help="the rollout nodes see it too")
    parser.add_argument("--mini_batch_size", type=int, default=1, help="rows of an update")
    parser.add_argument("--train_micro_batch_size", type=int, default=1)
    parser.add_argument("--eval_every_n_steps", type=int, default=1_000_000)
    parser.add_argument("--learning_rate", type=float, default=2e-7)
    args = parser.parse_args(argv)
    context.jax.initialize()
    mesh = serving.make_mesh(args)
    worker = TrainerWorker(lambda: _make_trainer(args, mesh), worker_id=args.worker_id)
    serving.serve(worker, args, context, "trainer")


def _make_trainer(args: argparse.Namespace, mesh: jax.sharding.Mesh) -> _OnMesh:
    config = peft_trainer_v2.TrainingConfig(
        eval_every_n_steps=args.eval_every_n_steps,
        gradient_accumulation_steps=math.ceil(args.mini_batch_size / args.train_micro_batch_size),
        metrics_prefix="actor",
        data_sharding_axis=("fsdp",),
    )
    with mesh:
        trainer = peft_trainer_v2.PeftTrainer(
            serving.load_actor(args, mesh),
            optax.adamw(learning_rate=args.learning_rate),
            config,
            weight_sync_worker_factory=lambda: WeightFolderWriter(
                args.weight_folder, args.worker_id
            ),
        )
    return _OnMesh(trainer, mesh)


class _OnMesh:
    """A trainer whose methods run in the context of a mesh, on whatever thread."""

    def __init__(self, trainer: Any, mesh: jax.sharding.Mesh) -> None:
        self._trainer = trainer
        self._mesh = mesh

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._trainer, name)
        if not callable(value):
            return value

        @functools.wraps(value)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._mesh:
                return value(*args, **kwargs)

        return call
