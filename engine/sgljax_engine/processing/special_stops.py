"""Stop strings that the text can never hold, since they are special tokens. Any thread."""

from __future__ import annotations

from collections.abc import Sequence

from sgljax_engine.errors import InvalidRequestError
from sgljax_engine.processing.tokenizer import DecodeOptions, Tokenizer

_MAX_KNOWN = 1024


class SpecialStops:
    """Finds the token that a stop string means, where texts leave special tokens out.

    transformers and SGLang stop there too.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, int | None] = {}

    def ids(self, stop: Sequence[str]) -> list[int]:
        """Ids of the stop strings that are special tokens.

        Refuses one that holds such a token beside other text: the output would never stop at it.
        """
        found = [self._id(text) for text in stop]
        return [token for token in found if token is not None]

    def _id(self, text: str) -> int | None:
        if text not in self._known:
            if len(self._known) >= _MAX_KNOWN:
                self._known = {}
            self._known[text] = self._find(text)
        return self._known[text]

    def _find(self, text: str) -> int | None:
        tokenizer, shown = self._tokenizer, DecodeOptions(skip_special_tokens=False)
        if tokenizer is None:
            return None
        try:
            tokenizer.check_decode_options(shown)
        except InvalidRequestError:  # it cannot say what it leaves out
            return None
        for token in tokenizer.encode_rendered(text):
            name = tokenizer.decode([token], shown)
            # The token of unknown characters is left out too, and has another text.
            if not name.strip() or name not in text or tokenizer.decode([token]):
                continue
            if text.strip() != name.strip():
                raise InvalidRequestError(
                    f"stop={text!r} holds the special token {name!r}, which the text leaves out; "
                    "use stop_token_ids, or skip_special_tokens=False"
                )
            return token
        return None
