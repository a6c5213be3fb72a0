"""llama.cpp as a worker process: continuous batching on its C API, commands as lines of JSON.

Runs by its path, with the interpreter of an environment that has `llama_cpp`; besides that it needs
the standard library and numpy. The protocol (`serve`) is that of our engine's process too.

It does what llama.cpp's own server does with its slots, and shares more: a prompt is prefilled
once for all of its requests, whose sequences copy its keys and values. All running rows are decoded
in one batch a step, and the next waiting request takes the place of a finished row at once.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

_CONTEXT_STEP = 256
_LOG_ERROR = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What a user of llama.cpp can choose.

    Attributes:
        num_slots: Maximum number of requests that it decodes together.
        is_unified: All sequences share one KV buffer; otherwise each has its own.
        flash_attention: Whether attention is one fused operation.
        batch_tokens: Maximum number of tokens in a batch: `n_batch` and `n_ubatch`.
    """

    num_slots: int
    is_unified: bool = False
    flash_attention: bool = True
    batch_tokens: int = 512

    def in_words(self) -> str:
        """A list for reports."""
        cache = "one KV buffer" if self.is_unified else "a KV buffer per sequence"
        attention = "flash attention" if self.flash_attention else "no flash attention"
        slots = f"{self.num_slots} slot{'s' * (self.num_slots > 1)}"
        return ", ".join((slots, cache, attention, f"batches of {self.batch_tokens}"))


def serve(handlers: Mapping[str, Callable[..., dict[str, Any]]]) -> None:
    """Answers commands from the standard input until it ends.

    A line is a JSON object: `command`, the name of a handler, and its arguments. The answer is what
    the handler returns, or `error`. What libraries print goes to the standard error.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        arguments = json.loads(line)
        try:
            answer = handlers[arguments.pop("command")](**arguments)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


class Context:
    """A context of llama.cpp: the KV cache of some sequences."""

    def __init__(self, lib: Any, model: Any, settings: Settings, max_model_len: int) -> None:
        """Makes the context, with a sequence of `max_model_len` positions for each slot."""
        self._lib, self.settings = lib, settings
        params = lib.llama_context_default_params()
        length = -(-max_model_len // _CONTEXT_STEP) * _CONTEXT_STEP
        params.n_ctx, params.n_seq_max = length * settings.num_slots, settings.num_slots
        params.n_batch = params.n_ubatch = settings.batch_tokens
        params.n_outputs_max = settings.num_slots
        params.n_threads = params.n_threads_batch = os.cpu_count() or 1
        params.type_k = params.type_v = lib.GGML_TYPE_F16
        params.kv_unified = settings.is_unified
        params.flash_attn_type = (
            lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
            if settings.flash_attention
            else lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        self._context = lib.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context with {settings.in_words()}")
        self._memory = lib.llama_get_memory(self._context)
        self._vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        self._batch, self._arrays = _make_batch(lib, settings.batch_tokens)

    def decode(
        self, tokens: np.ndarray, positions: np.ndarray, sequences: np.ndarray, wanted: np.ndarray
    ) -> np.ndarray:
        """Computes one batch of at most `batch_tokens`.

        Args:
            tokens: [n] ids.
            positions: [n].
            sequences: [n].
            wanted: [n] of bool: whose logits to return.

        Returns:
            [wanted, vocab] float32; valid until the next call.
        """
        count = len(tokens)
        values = {"token": tokens, "pos": positions, "seq_id": sequences, "logits": wanted}
        for name, value in values.items():
            self._arrays[name][:count] = value
        self._batch.n_tokens = count
        code = self._lib.llama_decode(self._context, self._batch)
        if code:
            raise RuntimeError(f"llama_decode of {count} tokens returned {code}")
        num_wanted = int(np.count_nonzero(wanted))
        if not num_wanted:
            self._lib.llama_synchronize(self._context)
            return np.empty((0, self._vocab_size), np.float32)
        logits = self._lib.llama_get_logits(self._context)
        return np.ctypeslib.as_array(logits, (num_wanted, self._vocab_size))

    def clear(self) -> None:
        """Empties all sequences."""
        self._lib.llama_memory_clear(self._memory, False)

    def truncate(self, sequence: int, num_positions: int) -> None:
        """Keeps the first positions of a sequence."""
        self._lib.llama_memory_seq_rm(self._memory, sequence, num_positions, -1)

    def copy(self, source: int, target: int, num_positions: int) -> None:
        """Makes a sequence the first positions of another one."""
        self.truncate(target, 0)
        # A buffer of its own takes the whole source; a shared one only refers to its cells.
        end = num_positions if self.settings.is_unified else -1
        self._lib.llama_memory_seq_cp(self._memory, source, target, -1, end)
        self.truncate(target, num_positions)

    def close(self) -> None:
        """Frees the memory."""
        self._lib.llama_free(self._context)


def _make_batch(lib: Any, num_tokens: int) -> tuple[Any, dict[str, np.ndarray]]:
    """A llama_batch, and the arrays that it points to by name of the field."""
    kinds = {"token": np.int32, "pos": np.int32, "seq_id": np.int32, "logits": np.int8}
    arrays: dict[str, np.ndarray] = {n: np.zeros(num_tokens, kind) for n, kind in kinds.items()}
    arrays["n_seq_id"] = np.ones(num_tokens, np.int32)
    sequences = arrays["seq_id"]
    arrays["pointers"] = sequences.ctypes.data + sequences.itemsize * np.arange(
        num_tokens, dtype=np.uintp
    )
    batch = lib.llama_batch()
    types = dict(batch._fields_)
    for name, array in arrays.items():
        if name != "pointers":
            source = arrays["pointers"] if name == "seq_id" else array
            setattr(batch, name, ctypes.cast(source.ctypes.data, types[name]))
    return batch, arrays


class Batcher:
    """Answers requests; a row is a slot, and a sequence of the context."""

    def __init__(self, context: Any) -> None:
        """Takes a `Context`, or what acts like one."""
        self._context = context

    def generate(self, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[list[int]]:
        """Greedy tokens of each request, as many as its length says."""
        rows = self._context.settings.num_slots
        self._prompts, self._lengths = [tuple(prompt) for prompt in prompts], lengths
        self._context.clear()
        self._outputs: list[list[int]] = [[] for _ in prompts]
        self._waiting = deque(range(len(prompts)))
        self._held: list[tuple[int, ...] | None] = [None] * rows
        self._requests = np.full(rows, -1)
        self._tokens, self._positions, self._left = (np.zeros(rows, np.int32) for _ in range(3))
        while self._waiting or self._left.any():
            if self._waiting and not self._left.all():
                self._admit()
            if self._left.any():
                self._step()
        return self._outputs

    def _step(self) -> None:
        """One token for every running row."""
        rows = np.flatnonzero(self._left)
        wanted = np.ones(len(rows), bool)
        logits = self._context.decode(self._tokens[rows], self._positions[rows], rows, wanted)
        tokens = logits.argmax(axis=1)
        self._positions[rows] += 1
        self._tokens[rows] = tokens
        self._left[rows] -= 1
        for request, token in zip(self._requests[rows].tolist(), tokens.tolist(), strict=True):
            self._outputs[request].append(token)

    def _admit(self) -> None:
        """Gives free rows to waiting requests; prompts that no sequence holds are prefilled."""
        new: dict[tuple[int, ...], list[int]] = {}
        for row in np.flatnonzero(self._left == 0).tolist():
            if not self._waiting:
                break
            request = self._waiting.popleft()
            prompt = self._prompts[request]
            self._requests[row], self._left[row] = request, self._lengths[request]
            if prompt in new:
                new[prompt].append(row)
            elif prompt in self._held:
                self._share(self._held.index(prompt), row)
            else:
                new[prompt] = [row]
            self._held[row] = None if prompt in new else prompt
        if new:
            self._prefill(new)

    def _share(self, source: int, row: int) -> None:
        """Takes a held prompt but for its last token, which the next step computes."""
        prompt = self._prompts[self._requests[row]]
        self._tokens[row], self._positions[row] = prompt[-1], len(prompt) - 1
        if source == row:
            self._context.truncate(row, len(prompt) - 1)
        else:
            self._context.copy(source, row, len(prompt) - 1)

    def _prefill(self, new: Mapping[tuple[int, ...], list[int]]) -> None:
        """Computes prompts, each once, and gives all of its rows the first token."""
        for rows in new.values():
            self._context.truncate(rows[0], 0)
        tokens = np.concatenate([np.array(prompt, np.int32) for prompt in new])
        positions = np.concatenate([np.arange(len(prompt)) for prompt in new])
        leaders = np.array([rows[0] for rows in new.values()])
        sequences = np.repeat(leaders, [len(prompt) for prompt in new])
        wanted = np.zeros(len(tokens), bool)
        wanted[np.cumsum([len(prompt) for prompt in new]) - 1] = True
        firsts: list[int] = []
        size = self._context.settings.batch_tokens
        for start in range(0, len(tokens), size):
            part = slice(start, start + size)
            batch = (tokens[part], positions[part], sequences[part], wanted[part])
            firsts += self._context.decode(*batch).argmax(axis=1).tolist()
        for (prompt, rows), first in zip(new.items(), firsts, strict=True):
            for row in rows:
                if row != rows[0]:
                    self._context.copy(rows[0], row, len(prompt))
                self._held[row] = prompt
                self._tokens[row], self._positions[row] = first, len(prompt)
                self._left[row] -= 1
                self._outputs[self._requests[row]].append(first)


class Peer:
    """The commands of the worker."""

    def __init__(self, path: str) -> None:
        """Loads a GGUF file."""
        self._lib: Any = importlib.import_module("llama_cpp")
        # Kept: llama.cpp holds no reference to it.
        self._log = self._lib.llama_log_callback(_log_errors)
        self._lib.llama_log_set(self._log, None)
        self._lib.llama_backend_init()
        params = self._lib.llama_model_default_params()
        self._model = self._lib.llama_model_load_from_file(path.encode(), params)
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {path}")
        self._context: Context | None = None

    def describe(self) -> dict[str, Any]:
        """Version, and what the library was compiled for."""
        system = self._lib.llama_print_system_info().decode()
        return {"version": self._lib.__version__, "system": system}

    def open(self, max_model_len: int, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Makes a context in place of the last one."""
        if self._context is not None:
            self._context.close()
            self._context = None
        chosen = Settings(**settings)
        self._context = Context(self._lib, self._model, chosen, max_model_len)
        self._batcher = Batcher(self._context)
        return {}

    def run(self, prompts: list[list[int]], lengths: list[int]) -> dict[str, Any]:
        """Answers requests in the open context."""
        return {"outputs": self._batcher.generate(prompts, lengths)}


def _log_errors(level: int, text: bytes, _data: object) -> None:
    if level == _LOG_ERROR:
        print(text.decode(errors="replace"), end="", file=sys.stderr)


if __name__ == "__main__":
    peer = Peer(sys.argv[1])
    serve({"describe": peer.describe, "open": peer.open, "run": peer.run})
