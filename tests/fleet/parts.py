"""What tests of a fleet share: servers of this process, a store, and rollouts on them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flax import nnx

from sgljax_engine import Engine
from sgljax_engine.server import Server
from tests import tunix_reference as ref
from tests.adapter.helpers import MODEL, new_rollout, rollout_config
from tests.geometry import SMALL
from tunix_sgljax import SglJaxFleetRollout
from tunix_sgljax.model_config import to_model_config

MAX_LEN = 128
QUICK: dict[str, Any] = {"request_timeout_s": 60, "sync_timeout_s": 60, "outage_timeout_s": 60}


class Worker:
    """A server with an engine of random weights, which others replace."""

    def __init__(self, actor: Any, store: Path, name: str, **options: Any) -> None:
        self.engine = Engine(
            model_config=to_model_config(actor.config, context_length=MAX_LEN),
            load_format="dummy",
            tokenizer=ref.IntegerTokenizer(),
            **{**SMALL, **options},
        )
        self.server: Server = self.engine.serve(
            port=0, weights_store=str(store), replica_id=name, drain_timeout_s=0.0
        )

    @property
    def url(self) -> str:
        return self.server.url

    def close(self) -> None:
        self.engine.shutdown()


@contextlib.contextmanager
def workers(actor: nnx.Module, store: Path, count: int, **options: Any) -> Iterator[list[Worker]]:
    with contextlib.ExitStack() as stack:
        made = []
        for index in range(count):
            worker = Worker(actor, store, f"worker-{index}", **options)
            stack.callback(worker.close)
            made.append(worker)
        yield made


def fleet_rollout(
    actor: nnx.Module,
    store: Path,
    fleet: list[Worker],
    changes: Mapping[str, Any] | None = None,
    **options: Any,
) -> SglJaxFleetRollout:
    """A rollout on workers, with `changes` of its FleetConfig; the caller closes it."""
    urls = [worker.url for worker in fleet]
    settings = {"urls": urls, "weights_store": str(store), **QUICK, **(changes or {})}
    merged: dict[str, Any] = {
        "tokenizer": ref.IntegerTokenizer(),
        "rollout_config": rollout_config(),
        **options,
    }
    return SglJaxFleetRollout(fleet=settings, rollout_actor=actor, **merged)


__all__ = ["MODEL", "QUICK", "Worker", "fleet_rollout", "new_rollout", "workers"]
