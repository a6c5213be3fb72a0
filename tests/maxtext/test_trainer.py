"""MaxText's own RL trainer through the command: it learns, and what it does not do is refused."""

from __future__ import annotations

import sys

import pytest

from sgljax_engine import InvalidConfigError
from tests.maxtext import recipe
from tests.maxtext.runs import command
from tunix_sgljax.cli import main as cli
from tunix_sgljax.maxtext import SglJaxMaxTextRollout
from tunix_sgljax.maxtext.trainer import TRAINER

# MaxText's libraries warn at import and at each step.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "flat"])
def test_twenty_steps_raise_the_reward(scan, tmp_path, capsys):
    run = command(tmp_path, 20, f"scan_layers={scan}")
    assert isinstance(run.rollout, SglJaxMaxTextRollout)
    assert run.rollout.weight_version == 20
    assert len(run.texts) == 20
    assert run.differing == [[]] * 20
    assert run.rewards[-5:].mean() > run.rewards[:5].mean() + 0.1, run.rewards
    said = capsys.readouterr().err
    assert "not installed: tpu_inference and vllm" in said
    assert f"{TRAINER}.MaxTextVllmRollout is SglJaxMaxTextRollout until" in said
    assert not any("maxtext_vllm" in name or name == TRAINER for name in sys.modules)


@pytest.mark.parametrize(
    ("words", "scan"),
    [
        pytest.param(recipe.GPT_OSS, True, id="gpt-oss-scanned"),
        pytest.param(recipe.GPT_OSS, False, id="gpt-oss-flat", marks=pytest.mark.slow),
        pytest.param(recipe.MIXTRAL, True, id="mixtral-scanned", marks=pytest.mark.slow),
        pytest.param(recipe.MIXTRAL, False, id="mixtral-flat"),
        pytest.param(recipe.OLMO3, True, id="olmo3-scanned", marks=pytest.mark.slow),
        pytest.param(recipe.OLMO3, False, id="olmo3-flat", marks=pytest.mark.slow),
    ],
)
def test_twenty_steps_of_other_models(words, scan, tmp_path):
    """Weights are the trainer's after each sync, and log-probs are at the end."""
    no_padding = "sgljax_config.sampling_params.bad_token_ids=[0]"
    run = command(
        tmp_path, 20, *words, f"scan_layers={scan}", no_padding, report_on=["say e, ann", "e"]
    )
    assert run.rollout.weight_version == 20
    assert run.differing == [[]] * 20
    assert len(run.texts) == 20
    assert run.rewards[-5:].mean() > run.rewards[:5].mean() + 0.1, run.rewards
    assert run.report is not None
    assert run.report.overall.num_tokens > 20
    assert run.report.is_within(), str(run.report)


def test_twenty_steps_of_lora_raise_the_reward(tmp_path, capsys):
    words = ("lora.enable_lora=True", "lora.lora_rank=4", "lora.lora_alpha=8.0")
    run = command(tmp_path, 20, *words, "learning_rate=0.03")
    report = run.rollout.lora_report
    assert report is not None
    assert report.num_pairs == 7
    assert run.rollout.weight_version == 20
    assert run.differing == [[]] * 20
    assert run.rewards[-5:].mean() > run.rewards[:5].mean() + 0.1, run.rewards
    assert "gives the actor LoRA pairs of rank 4 until" in capsys.readouterr().err


def test_bfloat16_is_what_the_rollout_computes_in_if_the_trainer_does(tmp_path):
    run = command(tmp_path, 2, "dtype=bfloat16", "weight_dtype=float32")
    assert run.rollout.dtype == "bfloat16"
    assert run.differing == [[]] * 2


def test_options_of_the_rollout_reach_it(tmp_path):
    """trainer_match: the log-probs are those of MaxText's own model."""
    options = ("sgljax_config.page_size=8", "sgljax_config.logprobs_mode=trainer_match")
    run = command(tmp_path, 2, *options)
    assert run.rollout.logprobs_mode == "trainer_match"
    assert run.rollout._builder.engine_config.cache.page_size == 8


def test_agentic_rollouts_are_refused_by_what_tunix_lacks(tmp_path):
    with pytest.raises(InvalidConfigError, match=r"google-tunix .* lacks: force_on_policy_ratio"):
        command(tmp_path, 1, "rl.use_agentic_rollout=True")
    assert TRAINER not in sys.modules


def test_evaluation_before_and_after(tmp_path):
    run = command(tmp_path, 1, "num_test_batches=1")
    # One greedy batch before training, one step of samples, one batch after.
    assert [len(texts) for texts in run.texts] == [
        recipe.BATCH,
        recipe.BATCH * recipe.NUM_GENERATIONS,
        recipe.BATCH,
    ]


def test_gsm8k_as_maxtext_has_it(tmp_path):
    """Its prompts, rewards and evaluation, on rows in GSM8K's form."""
    own = (
        "dataset_name=openai/gsm8k",
        "eval_dataset_name=openai/gsm8k",
        "num_test_batches=1",
        "max_prefill_predict_length=512",  # a token is a character
        "max_target_length=528",
    )
    files = ("dataset_processor_path", "reward_functions_path", "reward_functions")
    run = command(tmp_path, 2, *own, without=files)
    # train_rl syncs before its first evaluation too.
    assert run.differing == [[]] * 3
    assert [len(texts) for texts in run.texts] == [recipe.BATCH, 16, 16, recipe.BATCH]


def test_checkpoints_are_written_and_continue(tmp_path):
    checkpoints = ("enable_checkpointing=True", "checkpoint_period=1")
    first = command(tmp_path, 2, *checkpoints)
    again = command(tmp_path, 4, *checkpoints)
    assert first.rollout.weight_version == 2
    assert len(again.texts) == 2  # steps 3 and 4


def test_a_model_that_the_engine_lacks_is_refused_before_it_is_made(tmp_path):
    """MaxText would train it; the message names the field of MaxText's config."""
    argv = ["maxtext", "rl", *recipe.words(tmp_path, 1, "fused_qkv=True")]
    with pytest.raises(ValueError, match="fused_qkv"):
        cli.find_command("maxtext").run(cli.make_parser(argv).parse_args(argv))
