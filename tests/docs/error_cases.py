"""What the producers of the troubleshooting page's errors share: engines, a rollout, folders."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sgljax_engine import Engine
from tests.adapter.helpers import new_rollout
from tests.engine.models import TINY, spread_weights
from tunix_sgljax import SglJaxRollout

GOLDEN = Path(__file__).parents[1] / "golden" / "qwen3_gqa_tied"
OPTIONS = {"page_size": 4, "num_kv_tokens": 160, "max_running_requests": 1, "token_buckets": (16,)}
OPTIONS |= {"chunked_prefill_size": 16, "decode_steps": 4}


class Parts:
    """Made on first use and shared by the producers, which leave them as they were."""

    def __init__(self, model: Any, tmp_path: Path, stack: contextlib.ExitStack) -> None:
        self.model = model
        self.tmp_path = tmp_path
        self._stack = stack
        self._engine: Engine | None = None
        self._rollout: SglJaxRollout | None = None

    @property
    def engine(self) -> Engine:
        """Serves TINY, without a tokenizer."""
        if self._engine is None:
            self._engine = self._stack.enter_context(new_engine())
        return self._engine

    @property
    def rollout(self) -> SglJaxRollout:
        """A rollout of the Tunix model, with its engine built."""
        if self._rollout is None:
            self._rollout = new_rollout(self.model, **OPTIONS)
            self._stack.callback(self._rollout.close)
            assert self._rollout.engine
        return self._rollout

    def folder(self, name: str, **config: Any) -> Path:
        """A copy of a small HF folder with other settings in its config.json."""
        folder = self.tmp_path / name
        folder.mkdir()
        for path in GOLDEN.iterdir():
            shutil.copyfile(path, folder / path.name)
        settings = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(settings | config))
        return folder


def new_engine(**changes: Any) -> Engine:
    """An engine of TINY, without a tokenizer."""
    options: dict[str, Any] = OPTIONS | changes
    return Engine(model_config=TINY, weights=spread_weights(), **options)


@contextlib.contextmanager
def held_request(engine: Engine) -> Iterator[None]:
    """A request that has started and holds its pages while generation is paused in place."""
    stream = engine.generate(
        input_ids=[1, 2, 3], sampling_params={"max_new_tokens": 120}, stream=True
    )
    try:
        next(stream)
        engine.pause_generation("in_place")
        yield
    finally:
        stream.close()
        engine.continue_generation()


Producer = Callable[[Parts], Any]


class Producers(dict[str, Producer]):
    """Producers by the name that the page has in front of the message."""

    def named(self, name: str) -> Callable[[Producer], Producer]:
        """Registers a producer; the same name twice is an error."""

        def register(producer: Producer) -> Producer:
            assert name not in self, name
            self[name] = producer
            return producer

        return register
