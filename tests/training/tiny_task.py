"""A task for a tiny model: prompts and completions are numbers, one for each token."""

from __future__ import annotations

import os
import signal

EOS = 1


was_interrupted = False


class Tokenizer:
    """Text is ids: "5 17 3" encodes to [5, 17, 3]."""

    pad = 0

    def pad_id(self):
        return self.pad

    def bos_id(self):
        return 0

    def eos_id(self):
        return EOS

    def encode(self, text):
        return [int(word) for word in text.split()]

    def decode(self, ids):
        return " ".join(str(int(i)) for i in ids if i > EOS)


def rows(num, start=0):
    """Prompts of different lengths, each with the number that it ends with."""
    prompts = [[2 + (start + 7 * i + j) % 60 for j in range(1 + i % 4)] for i in range(num)]
    return [{"prompts": " ".join(map(str, ids)), "answer": str(ids[-1])} for ids in prompts]


def share_of_even(prompts, completions, answer, **_):
    """Something that samples differ in."""
    assert len(prompts) == len(completions) == len(answer)
    words = [text.split() for text in completions]
    return [sum(int(word) % 2 == 0 for word in row) / (len(row) or 1) for row in words]


def lacks_columns(prompts, completions):
    """Cannot be called with columns."""
    return share_of_even(prompts, completions, prompts)


def needs_another(completions, solution, **_):
    """Cannot be called without a column that there is not."""
    return [float(text == each) for text, each in zip(completions, solution, strict=True)]


def nothing_known(completions, **_):
    """Ends no group early."""
    return [None for _ in completions]


def first_is_even(prompts, completions, answer, **_):
    """The same in whole numbers, as PPO needs them."""
    assert len(prompts) == len(completions) == len(answer)
    return [float(bool(text) and int(text.split()[0]) % 2 == 0) for text in completions]


def interrupting(prompts, completions, answer, **columns):
    """The user presses Ctrl-C during the first step."""
    global was_interrupted
    if not was_interrupted:
        was_interrupted = True
        os.kill(os.getpid(), signal.SIGINT)
    return share_of_even(prompts, completions, answer, **columns)
