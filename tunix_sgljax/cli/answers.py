from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sgljax_engine import EngineState
from tunix_sgljax.cli.output import emit, say
from tunix_sgljax.cli.prompts import Prompt


class _InOrder:
    """Puts lines in the order of their index."""

    def __init__(self) -> None:
        self._next = 0
        self._waiting: dict[int, list[str]] = {}

    def put(self, index: int, lines: list[str]) -> list[str]:
        """Adds the lines of an index; returns all lines that may be written now."""
        self._waiting[index] = lines
        ready: list[str] = []
        while self._next in self._waiting:
            ready += self._waiting.pop(self._next)
            self._next += 1
        return ready


class TextWriter:
    """Writes texts to stdout in the order of the prompts, with headings if there are several."""

    def __init__(self, num_prompts: int) -> None:
        self._num_prompts = num_prompts
        self._order = _InOrder()

    def write(self, index: int, prompt: Prompt, outputs: Sequence[dict[str, Any]]) -> None:
        lines: list[str] = []
        for sample, output in enumerate(outputs):
            of = f", sample {sample + 1}/{len(outputs)}" if len(outputs) > 1 else ""
            if self._num_prompts > 1 or of:
                lines.append(f"=== {index + 1}/{self._num_prompts}{of}")
            lines.append(output["text"])
        self._emit(index, lines)

    def refuse(self, index: int, prompt: Prompt, error: Exception) -> None:
        say(f"error: {prompt.label}: {error}")
        self._emit(index, [])

    def _emit(self, index: int, lines: list[str]) -> None:
        for line in self._order.put(index, lines):
            emit(line)

    def close(self) -> None:
        """Does nothing."""


class JsonlWriter:
    """Writes one JSON object per sample, when its prompt is answered."""

    def __init__(self, path: str, *, keep_order: bool) -> None:
        self._file = Path(path).open("w", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._order = _InOrder() if keep_order else None

    def write(self, index: int, prompt: Prompt, outputs: Sequence[dict[str, Any]]) -> None:
        self._put(
            index,
            [
                {**_head(index, prompt), "sample": sample, **_row(output)}
                for sample, output in enumerate(outputs)
            ],
        )

    def refuse(self, index: int, prompt: Prompt, error: Exception) -> None:
        say(f"error: {prompt.label}: {error}")
        self._put(index, [{**_head(index, prompt), "error": str(error)}])

    def _put(self, index: int, rows: list[dict[str, Any]]) -> None:
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        for line in lines if self._order is None else self._order.put(index, lines):
            self._file.write(line + "\n")

    def close(self) -> None:
        self._file.close()


Writer = TextWriter | JsonlWriter
"""Takes the answers in any order."""


def _head(index: int, prompt: Prompt) -> dict[str, Any]:
    named = {"id": prompt.id} if prompt.id is not None else {}
    return {"index": index, **named}


def _row(output: dict[str, Any]) -> dict[str, Any]:
    meta = output["meta_info"]
    row: dict[str, Any] = {
        "text": output["text"],
        "output_ids": output["output_ids"],
        "finish_reason": meta["finish_reason"],
        "prompt_tokens": meta["prompt_tokens"],
        "completion_tokens": meta["completion_tokens"],
        "time_to_first_token_s": meta["time_to_first_token"],
        "latency_s": meta["e2e_latency"],
    }
    if "output_token_logprobs" in meta:
        row["logprobs"] = [entry[0] for entry in meta["output_token_logprobs"]]
    if "output_top_logprobs" in meta:
        row["top_logprobs"] = [
            [[token, logprob] for logprob, token, _ in entries]
            for entries in meta["output_top_logprobs"]
        ]
    return row


class Summary:
    """Counts answers; the clock starts at construction."""

    def __init__(self) -> None:
        self.num_refused = self.num_not_started = 0
        self._start = time.perf_counter()
        self._num_tokens: list[int] = []
        self._first_token_s: list[float] = []
        self._num_aborted = 0

    def add(self, output: dict[str, Any]) -> None:
        meta = output["meta_info"]
        self._num_tokens.append(meta["completion_tokens"])
        if meta["time_to_first_token"] is not None:
            self._first_token_s.append(meta["time_to_first_token"])
        self._num_aborted += meta["finish_reason"]["type"] == "abort"

    def in_words(self, state: EngineState) -> str:
        seconds = time.perf_counter() - self._start
        total = sum(self._num_tokens)
        parts = [
            f"{len(self._num_tokens)} answer(s), {total} tokens in {seconds:.2f} s: "
            f"{total / seconds:.1f} tokens/s"
        ]
        if self._first_token_s:
            median, worst = statistics.median(self._first_token_s), max(self._first_token_s)
            parts.append(f"time to first token {median:.3f} s (median), {worst:.3f} s (longest)")
        if state.num_compiles:
            parts.append(f"{state.num_compiles} programs compiled in {state.compile_s:.1f} s")
        if self._num_aborted:
            parts.append(f"{self._num_aborted} cut short")
        for count, what in ((self.num_refused, "refused"), (self.num_not_started, "not started")):
            if count:
                parts.append(f"{count} {what}")
        return "; ".join(parts)
