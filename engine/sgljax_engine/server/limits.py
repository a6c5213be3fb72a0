"""Limits of a request, so that refusing one takes no work: docs/server.md has the table."""

from __future__ import annotations

import dataclasses

from sgljax_engine import Engine
from sgljax_engine.server.config import ServerConfig

SMALL_BYTES = 2048
"""A body that is parsed and tokenized within about a millisecond, on the event loop itself."""

MAX_MESSAGES = 4096
MAX_TOOLS = 1024
MAX_FIELDS = 1024
"""Most fields of one JSON object; `logit_bias` may hold the vocabulary."""

MAX_CHARS_PER_TOKEN = 256
"""More than the longest entry of any vocabulary that is known."""

_MAX_BYTES_PER_CHAR = 12
"""Two escapes in JSON make one character."""

TOKENIZE_FACTOR = 4
"""`/tokenize` takes texts of so many times `max_model_len` tokens: clients cut them by it."""

TEMPLATE_TIMEOUT_S = 30.0
"""Seconds for a chat template, and for tokenizing what it wrote."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BodyLimits:
    """Counts of a JSON body.

    Attributes:
        max_containers: Objects and lists in it.
        max_members: Fields of all objects in it.
        max_strings: Strings in it, names of fields included.
        max_entries: Entries of one list.
        max_literal_bytes: Bytes of one string as it is written.
        max_prompts: Entries of any list of one entry a prompt.
        vocab_size: Fields of `logit_bias`.
    """

    max_containers: int
    max_members: int
    max_strings: int
    max_entries: int
    max_literal_bytes: int
    max_prompts: int
    vocab_size: int

    @classmethod
    def for_server(cls, engine: Engine, config: ServerConfig) -> BodyLimits:
        """Limits that the largest requests which can be served are far from."""
        count, vocab_size = max(4096, config.max_requests), engine.model_config.vocab_size
        max_tokens = TOKENIZE_FACTOR * engine.max_model_len
        return cls(
            max_containers=16 * count,
            max_members=32 * count,
            max_strings=96 * count,
            max_entries=max(count, max_tokens, vocab_size),
            max_literal_bytes=_MAX_BYTES_PER_CHAR * MAX_CHARS_PER_TOKEN * max_tokens,
            max_prompts=config.max_requests,
            vocab_size=vocab_size,
        )
