"""Where drafts come from, and when they pay. No device."""

from __future__ import annotations

import threading

import numpy as np

from sgljax_engine.speculation.drafters import End, HistoryDrafter, SiblingDrafter
from sgljax_engine.speculation.speeds import Speeds
from sgljax_engine.speculation.texts import MATCHED_TOKENS, RequestText

PROMPT = list(range(20))
TAIL = PROMPT[-MATCHED_TOKENS:]


def text(output: list[int], prompt: list[int] = PROMPT) -> RequestText:
    made = RequestText(prompt)
    made.update(output)
    return made


def lists(references) -> list[list[int]]:
    return [each.tolist() for each in references]


def test_a_text_grows():
    made, output = RequestText(PROMPT), []
    views = []
    for token in range(500):
        output.append(token)
        made.update(output)
        views.append((made.tokens, made.reference, list(output)))
    for tokens, reference, expected in views:  # old ones are not changed
        assert tokens.tolist() == PROMPT + expected
        assert reference.tolist() == TAIL + expected
    assert made.num_output == 500
    assert made.key == RequestText(PROMPT).key != RequestText([1]).key


class TestSiblings:
    def test_others_of_the_prompt_the_longest_last(self):
        drafter = SiblingDrafter()
        long, short, own, empty = text([1, 2, 3]), text([4]), text([5, 6]), text([])
        for each in (long, short, own, empty, text([9], prompt=[1])):
            drafter.add(each)
        assert lists(drafter.references(own)) == [[*TAIL, 4], [*TAIL, 1, 2, 3]]
        drafter.finish(long, End(version=0))
        drafter.finish(short, End(is_moved=True))
        assert lists(drafter.references(own)) == [[*TAIL, 1, 2, 3]]


class TestHistory:
    def answer(self, drafter: HistoryDrafter, *outputs: list[int], prompt=PROMPT, version=0):
        texts = [text(output, prompt) for output in outputs]
        for each in texts:
            drafter.add(each)
        for each in texts:
            drafter.finish(each, End(version=version))

    def test_answers_of_earlier_calls_the_newest_last(self):
        drafter = HistoryDrafter(10_000)
        self.answer(drafter, [1], [2], version=3)
        self.answer(drafter, [3], version=4)
        assert lists(drafter.references(text([]))) == [[*TAIL, 1], [*TAIL, 2], [*TAIL, 3]]
        assert [answer.version for answer in drafter._answers[text([]).key]] == [3, 3, 4]
        assert not drafter.references(text([], prompt=[1]))

    def test_samples_of_an_unfinished_group_are_not_history(self):
        drafter, first, second = HistoryDrafter(10_000), text([1]), text([2])
        for each in (first, second):
            drafter.add(each)
        drafter.finish(first, End(version=0))
        assert not drafter.references(second)
        drafter.finish(second, End())  # aborted
        assert lists(drafter.references(text([]))) == [[*TAIL, 1]]

    def test_bytes_are_limited_and_the_oldest_prompt_goes_first(self):
        drafter = HistoryDrafter(1000)
        for prompt in ([1], [2], [3], [1], [4]):
            self.answer(drafter, list(range(60)), prompt=prompt)  # 260 bytes each
            assert drafter.num_bytes <= 1000
        has = [bool(drafter.references(text([], prompt=[p]))) for p in (1, 2, 3, 4)]
        assert has == [True, False, False, True]
        self.answer(drafter, list(range(5000)))
        assert drafter.num_bytes == 0
        assert not drafter._answers

    def test_bytes_are_those_of_what_is_kept(self):
        drafter, rng = HistoryDrafter(20_000), np.random.default_rng(0)
        for _ in range(300):
            output = list(range(rng.integers(1, 100)))
            self.answer(drafter, *[output] * int(rng.integers(1, 5)), prompt=[int(rng.integers(9))])
            kept = drafter._answers
            num_bytes = sum(len(key) for key in kept)
            num_bytes += sum(a.tokens.nbytes for answers in kept.values() for a in answers)
            assert drafter.num_bytes == num_bytes <= 20_000
            assert all(0 < len(answers) <= 16 for answers in kept.values())

    def test_answers_are_loaded(self):
        drafter, other = HistoryDrafter(10_000), HistoryDrafter(10_000)
        self.answer(drafter, [1], [2])
        other.load(drafter._answers)
        assert lists(other.references(text([]))) == lists(drafter.references(text([])))
        assert other.num_bytes == drafter.num_bytes
        small = HistoryDrafter(10)
        small.load(drafter._answers)
        assert small.num_bytes == 0

    def test_threads(self):
        """Engines of a group share it."""
        drafter = HistoryDrafter(5000)

        def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            for _ in range(300):
                self.answer(
                    drafter, [seed] * int(rng.integers(1, 60)), prompt=[int(rng.integers(5))]
                )
                drafter.references(text([], prompt=[int(rng.integers(5))]))

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not drafter._num_unfinished
        assert not drafter._finished
        kept = drafter._answers
        num_bytes = sum(a.tokens.nbytes for answers in kept.values() for a in answers)
        assert drafter.num_bytes == num_bytes + sum(map(len, kept)) <= 5000

    def test_only_the_part_around_the_request(self):
        drafter = HistoryDrafter(10**6)
        self.answer(drafter, list(range(10_000)))
        (found,) = drafter.references(text([0] * 5000))
        assert 5000 in found
        assert len(found) < 3000


class TestSpeeds:
    """Made-up seconds of a token decide."""

    def run(self, speeds: Speeds, seconds: dict[int, float], count: int) -> list[int]:
        taken = []
        for _ in range(count):
            taken.append(speeds.pick())
            speeds.learn(taken[-1], seconds[taken[-1]])
        return taken

    def test_the_fastest_is_taken(self):
        for times in ((1.0, 0.5, 0.7), (1.0, 2.0, 0.9), (1.0, 3.0, 4.0)):
            seconds: dict[int, float] = dict(zip((1, 4, 16), times, strict=True))
            speeds = Speeds((1, 4, 16))
            taken = self.run(speeds, seconds, 400)
            assert set(taken) == {1, 4, 16}
            best = min(seconds, key=lambda size: seconds[size])
            assert speeds.best == best
            assert taken.count(best) > 360
            assert all(speeds.is_trial(size) == (size != best) for size in seconds)

    def test_drafts_must_be_clearly_faster(self):
        speeds = Speeds((1, 4))
        self.run(speeds, {1: 1.0, 4: 0.97}, 50)
        assert speeds.best == 1

    def test_vain_trials_become_rare(self):
        taken = self.run(Speeds((1, 4)), {1: 1.0, 4: 4.0}, 2000)
        trials = [index for index, size in enumerate(taken) if size == 4]
        waits = np.diff(trials[2:])
        assert (np.diff(waits) >= 0).all()
        assert waits[0] < 100 < waits[-1] < 300

    def test_what_becomes_fast_is_found(self):
        speeds = Speeds((1, 4))
        self.run(speeds, {1: 1.0, 4: 4.0}, 300)
        self.run(speeds, {1: 1.0, 4: 0.3}, 1200)
        assert speeds.best == 4

    def test_one_disturbed_dispatch_changes_nothing(self):
        speeds = Speeds((1, 4))
        self.run(speeds, {1: 1.0, 4: 0.5}, 60)
        speeds.learn(4, 1.5)
        assert speeds.best == 4
