"""What checkpoints keep beside the weights, and what a resumed run makes of it."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.sft.checkpoint_manager import CheckpointManager

from sgljax_engine.sampling_params import SeedSource
from tunix_sgljax.checkpoints.data_place import DataPlace
from tunix_sgljax.checkpoints.run_state import keep_state, restored_state
from tunix_sgljax.long_tail.feed import ROW, PromptFeed
from tunix_sgljax.rollout.generating import SamplingReader


class TestCheckpoints:
    @pytest.fixture
    def trainer(self, tmp_path) -> Any:
        """What is read of Tunix's trainer, with a real manager whose folders have a prefix."""
        options = ocp.CheckpointManagerOptions(save_interval_steps=2, step_prefix="step")
        return types.SimpleNamespace(
            config=types.SimpleNamespace(checkpoint_root_directory=str(tmp_path)),
            checkpoint_manager=CheckpointManager(str(tmp_path), options),
            train_steps=0,
        )

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of orbax
    def test_each_keeps_the_state_of_its_update(self, trainer):
        model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
        state = {"rows": 0}
        keep_state(trainer, "place", lambda: dict(state))
        keep_state(trainer, "noise", lambda: [1])
        manager = trainer.checkpoint_manager
        for step in (2, 3):
            state["rows"] = step
            manager.save(step, model, None, custom_metadata={"global_step": step})
        assert manager.latest_step() == 2
        state["rows"] = 99  # what comes after the update
        manager.save(3, model, None, force=True)  # Tunix's last one, without metadata
        manager.close()
        for step in (2, 3):
            trainer.train_steps = step
            assert restored_state(trainer, "place") == {"rows": step}
            assert restored_state(trainer, "noise") == [1]
            assert restored_state(trainer, "other") is None
        root = trainer.config.checkpoint_root_directory
        options = ocp.CheckpointManagerOptions(step_prefix="step")
        step, metadata = CheckpointManager(root, options).maybe_restore(model)
        assert (step, metadata["global_step"]) == (3, 3)

    def test_none_without_a_checkpoint(self, trainer):
        assert restored_state(trainer, "place") is None
        trainer.config.checkpoint_root_directory = None
        before = trainer.checkpoint_manager
        keep_state(trainer, "place", dict)
        assert trainer.checkpoint_manager is before


def read_all(place: DataPlace, prompts: list[str]) -> DataPlace:
    for prompt in prompts:
        place.read(prompt)
    return place


class TestPlace:
    def test_rows_out_of_order(self):
        place = DataPlace()
        place.use([0, 1, 4], [2, 6])
        kept = place.to_json()
        assert (kept["below"], kept["above"], kept["dropped"]) == (3, [4, 6], True)
        again = DataPlace(99, kept)
        assert [number for number in range(8) if number in again] == [0, 1, 2, 4, 6]
        again.use([3])
        assert (again.num_below, again.to_json()["above"]) == (5, [6])

    @pytest.mark.parametrize(
        ("prompts", "message"),
        [
            (["a", "b", "c", "d"], ""),
            (["b", "a", "c"], "the first 3 prompts of train_ds are not those"),
            (["a", "bc", ""], "the first 3 prompts of train_ds are not those"),
            (["a", "b"], "train_ds has 2 rows; the checkpoint was trained with at least 3"),
        ],
    )
    def test_other_data_is_told(self, caplog, prompts, message):
        kept = read_all(DataPlace(), ["a", "b", "c"]).to_json()
        place = read_all(DataPlace(kept=kept), prompts)
        place.end()
        place.end()
        assert caplog.text.count(message) == 1 if message else not caplog.records


def batches(num_rows: int, size: int) -> list[dict[str, Any]]:
    rows = np.arange(num_rows)
    return [{"prompts": rows[i : i + size].astype(str)} for i in range(0, num_rows, size)]


class TestFeed:
    def test_gives_what_was_read_but_not_used_first(self):
        place = DataPlace(2)
        place.use([3, 5])
        feed = PromptFeed(batches(12, 4), place)
        assert feed.has_batch()
        assert [row.number for row in feed.take_early(1, is_owed=True)] == [2]
        assert [batch[ROW].tolist() for batch in feed] == [[4, 6, 7, 8], [9, 10, 11, 2]]

    def test_batches_may_have_another_size(self):
        place = DataPlace(4)
        place.use([6])
        sizes = [batch[ROW].tolist() for batch in PromptFeed(batches(12, 3), place)]
        assert sizes == [[4, 5, 7], [8, 9, 10], [11]]

    def test_after_dropped_rows_only_whole_batches_come(self):
        place = DataPlace()
        place.use([0, 1, 2, 3], [4])
        assert [batch[ROW].tolist() for batch in PromptFeed(batches(12, 4), place)] == [
            [5, 6, 7, 8]
        ]
        assert not PromptFeed(batches(8, 4), place).has_batch()

    def test_nothing_is_left(self):
        assert not PromptFeed(batches(4, 2), DataPlace(4)).has_batch()


class TestNoise:
    def test_fresh_seeds_go_on(self):
        whole, resumed = SeedSource(5), SeedSource(5)
        seeds = [whole.fresh() for _ in range(9)]
        resumed.fresh()
        resumed.skip_to(6)
        resumed.skip_to(2)
        assert [resumed.fresh() for _ in range(3)] == seeds[6:]
        assert (whole.num_drawn, resumed.num_drawn) == (9, 9)

    def reader(self) -> SamplingReader:
        reader = SamplingReader({}, 1)
        reader.bind(RolloutConfig())
        return reader

    def draw(self, reader: SamplingReader, seed: int) -> int:
        (params,) = reader.row_params(RolloutConfig(seed=seed), 1, shows_special_tokens=False)  # pyright: ignore[reportArgumentType]
        assert params.seed is not None
        return params.seed

    def test_draws_of_a_seed_go_on(self):
        whole, resumed = self.reader(), self.reader()
        drawn = [self.draw(whole, 7) for _ in range(3)]
        kept = whole.num_calls
        assert kept == {"7": 3}
        resumed.go_on(kept, are_others=False)
        assert self.draw(resumed, 7) == self.draw(whole, 7) not in drawn
        assert self.draw(resumed, 8) == self.draw(self.reader(), 8), "the first draw of that seed"

    def test_another_process_has_made_as_many_calls(self):
        whole, resumed = self.reader(), self.reader()
        for _ in range(3):
            self.draw(whole, 8)
        resumed.go_on({"7": 3}, are_others=True)
        assert self.draw(resumed, 8) == self.draw(whole, 8)

    def test_the_newest_seeds_are_kept(self):
        reader = self.reader()
        for seed in (*range(100), 3):
            self.draw(reader, seed)
        assert list(reader.num_calls)[-2:] == ["99", "3"]
        assert len(reader.num_calls) == 16
