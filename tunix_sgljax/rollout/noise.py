"""The random draws of a training's rollout, which go on where its checkpoint left them."""

from __future__ import annotations

import threading
import weakref

import jax
from tunix.rl.rl_cluster import RLCluster

from sgljax_engine import Engine
from tunix_sgljax.checkpoints.run_state import keep_state, restored_state
from tunix_sgljax.rollout.generating import SamplingReader

_NAME = "noise"


class Noise:
    """Keeps in a cluster's checkpoints how much has been drawn, and skips that in a resumed run.

    A resumed run then samples what the uninterrupted one would have, if its calls are the same.
    Any thread.
    """

    def __init__(self, reader: SamplingReader) -> None:
        self._reader = reader
        self._lock = threading.Lock()
        self._cluster: weakref.ref[RLCluster] | None = None

    def follow(self, cluster: RLCluster | None) -> None:
        """Takes a cluster that is being made: its trainer restores a checkpoint later."""
        self._cluster = None if cluster is None else weakref.ref(cluster)

    def go_on(self, engine: Engine) -> None:
        """Skips what the restored checkpoint says was drawn; call it before every draw."""
        if self._cluster is None:
            return
        with self._lock:
            cluster = None if self._cluster is None else self._cluster()
            if cluster is None:
                return
            trainer = cluster.actor_trainer
            kept = restored_state(trainer, _NAME)
            if kept is not None:
                self._reader.go_on(kept["calls"], are_others=jax.process_index() > 0)
                engine.skip_seeds_to(kept["drawn"])
            reader = self._reader
            keep_state(
                trainer,
                _NAME,
                lambda: {"calls": reader.num_calls, "drawn": engine.num_seeds_drawn},
            )
            self._cluster = None
