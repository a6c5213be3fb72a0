"""The objects that the routes of a server share."""

from __future__ import annotations

import dataclasses

from sgljax_engine import Engine
from sgljax_engine.server.config import ServerConfig
from sgljax_engine.server.generation import Generation
from sgljax_engine.server.limits import BodyLimits
from sgljax_engine.server.workers import Workers


class TokenTexts:
    """Texts and bytes of single tokens, kept by id.

    Attributes:
        special: The texts of special tokens, as far as they are known.
    """

    def __init__(self, engine: Engine) -> None:
        """Knows none."""
        self.special = frozenset(engine.special_tokens)
        self._engine = engine
        self._found: dict[int, tuple[str, bytes | None]] = {}

    def __getitem__(self, token: int) -> str:
        """The text of a token, with its space; U+FFFD where it is a part of a character."""
        return self._find(token)[0]

    def bytes_of(self, token: int) -> bytes | None:
        """The bytes of a token; None for a part of a character that is not known."""
        return self._find(token)[1]

    def _find(self, token: int) -> tuple[str, bytes | None]:
        if token not in self._found:
            known = self._engine.token_bytes(token)
            if known is not None:
                self._found[token] = known.decode(errors="replace"), known
            else:
                text = self._engine.detokenize([token], skip_special_tokens=None)
                self._found[token] = text, None if "\ufffd" in text else text.encode()
        return self._found[token]


@dataclasses.dataclass
class ServerContext:
    """One engine that is served.

    Attributes:
        engine: Answers.
        config: Limits and names.
        generation: The open requests.
        token_texts: Text of the engine's tokens.
        limits: Counts of a body.
        workers: Threads for what would hold the event loop up.
        version_labels: Labels that clients gave to weight versions.
    """

    engine: Engine
    config: ServerConfig
    generation: Generation
    token_texts: TokenTexts
    limits: BodyLimits
    workers: Workers
    version_labels: dict[int, str] = dataclasses.field(default_factory=dict)
