"""The examples' tokenizer. It imports nothing, so that any process can have it."""

from __future__ import annotations

from collections.abc import Sequence


class Tokenizer:
    """One token per character, with the five methods that Tunix's `TokenizerAdapter` asks for.

    Ids 0, 1 and 2 are padding, begin and end; the other 93 are the characters from space to `|`.
    """

    vocab_size = 96
    _FIRST_CHAR = ord(" ")
    _FIRST_ID = 3

    def pad_id(self) -> int:
        """Returns the id that fills unused positions."""
        return 0

    def bos_id(self) -> int:
        """Returns the id that Tunix puts before every prompt."""
        return 1

    def eos_id(self) -> int:
        """Returns the id that ends a completion."""
        return 2

    def encode(self, text: str) -> list[int]:
        """Returns the ids of the characters of `text`, with no special ids.

        Raises:
            ValueError: A character is outside the vocabulary.
        """
        ids = [ord(char) - self._FIRST_CHAR + self._FIRST_ID for char in text]
        for char, token_id in zip(text, ids, strict=True):
            if not self._FIRST_ID <= token_id < self.vocab_size:
                raise ValueError(f"{char!r} in {text!r} is not in the vocabulary")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids`, without padding, begin and end."""
        shift = self._FIRST_CHAR - self._FIRST_ID
        return "".join(chr(token_id + shift) for token_id in ids if token_id >= self._FIRST_ID)
