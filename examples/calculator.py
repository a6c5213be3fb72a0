"""The calculator task without JAX and Tunix: its problems, its tokens, its calls of the tool.

So a process that only plays episodes, such as `remote_agent.py`, starts fast. `calculator_task.py`
has what Tunix needs.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from char_tokenizer import Tokenizer as CharTokenizer

MAX_PROMPT_LENGTH = 16
MAX_RESPONSE_LENGTH = 80
NUM_OPERATIONS = 2
MAX_TURNS = NUM_OPERATIONS + 1
END_OF_TURN = "|"

_PROMPT = re.compile(r"Q: (\d+(?:[+-]\d+)+)= A:")
_CALL = re.compile(r"<calc>(-?\d{1,9})([+-])(\d{1,9})</calc>")


class Tokenizer(CharTokenizer):
    """One token a character. The end of a turn is a character too, the last of the vocabulary.

    So the text of a conversation encodes to the very tokens that were sampled, end tokens
    included: the next turn's prompt continues what the prefix cache holds.
    """

    def eos_id(self) -> int:
        """Returns the id that ends a turn."""
        (end,) = self.encode(END_OF_TURN)
        return end


class Calculation(NamedTuple):
    """Numbers to add to the first one; those below 0 are subtracted."""

    first: int
    others: tuple[int, ...]

    @property
    def prompt(self) -> str:
        """What the policy is asked."""
        return f"Q: {self.first}{''.join(f'{number:+}' for number in self.others)}= A:"

    @property
    def answer(self) -> str:
        """The result, in digits."""
        return str(self.first + sum(self.others))

    @property
    def calls(self) -> list[tuple[str, str]]:
        """Each call of the calculator that leads to the answer, with what it returns."""
        calls, total = [], self.first
        for number in self.others:
            calls.append((f"<calc>{total}{number:+}</calc>", str(total + number)))
            total += number
        return calls

    @classmethod
    def parse(cls, prompt: str) -> Calculation:
        """Returns the problem that `prompt` asks.

        Raises:
            ValueError: It is not a prompt of this task.
        """
        match = _PROMPT.fullmatch(prompt)
        if match is None:
            raise ValueError(f"not a prompt of the calculator task: {prompt!r}")
        first, *others = (int(number) for number in re.findall(r"[+-]?\d+", match[1]))
        return cls(first, tuple(others))


class Call(NamedTuple):
    """A call of the calculator."""

    a: int
    op: str
    b: int

    @property
    def result(self) -> str:
        """What the calculator returns."""
        return str(self.a + self.b if self.op == "+" else self.a - self.b)

    @classmethod
    def find(cls, turn: str) -> Call | None:
        """Returns the call that a turn is; None if it is anything else, hence an answer."""
        match = _CALL.fullmatch(turn)
        return None if match is None else cls(int(match[1]), match[2], int(match[3]))
