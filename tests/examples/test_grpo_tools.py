"""The example with a tool: its task, its parts, its loss masks, and a short run."""

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import addition_task
import calculator_task
import grpo_tools
import make_calculator_checkpoint
from calculator import (
    END_OF_TURN,
    MAX_PROMPT_LENGTH,
    MAX_RESPONSE_LENGTH,
    MAX_TURNS,
    Calculation,
    Tokenizer,
)
from calculator_task import CalculatorAgent, CalculatorEnvironment, ChatParser

QUICK_COMPILE = "that the example runs and what it reports"

CHECKPOINT = grpo_tools.ROOT / "examples/data/calculator_sft.safetensors"
PROBLEM = Calculation(37, (58, -21))


def test_calls_lead_to_the_answer():
    assert PROBLEM.prompt == "Q: 37+58-21= A:"
    assert PROBLEM.calls == [("<calc>37+58</calc>", "95"), ("<calc>95-21</calc>", "74")]
    assert PROBLEM.answer == "74"
    assert Calculation.parse(PROBLEM.prompt) == PROBLEM
    with pytest.raises(ValueError, match="not a prompt"):
        Calculation.parse("Q: 37= A:")


def test_problems_fit_the_limits():
    rng = np.random.default_rng(0)
    for _ in range(100):
        problem = calculator_task.sample_problem(rng)
        assert len(problem.prompt) + 1 <= MAX_PROMPT_LENGTH  # Tunix adds the begin token.
        turns = make_calculator_checkpoint.demonstration(problem, 0.0, rng)
        assert len(turns) == MAX_TURNS
        num_tokens = sum(len(turn + reply) for turn, reply in turns)
        assert num_tokens < MAX_RESPONSE_LENGTH  # Tunix drops episodes that use the limit up.
        assert len(problem.prompt) + 1 + num_tokens <= make_calculator_checkpoint.LENGTH


def test_all_numbers_have_two_digits():
    rng = np.random.default_rng(0)
    problems = [calculator_task.sample_problem(rng) for _ in range(300)]
    numbers = [abs(number) for problem in problems for number in (problem.first, *problem.others)]
    numbers += [int(result) for problem in problems for _, result in problem.calls]
    assert min(numbers) >= 10
    assert max(numbers) <= 99
    assert {number > 0 for problem in problems for number in problem.others} == {True, False}


@pytest.mark.parametrize(
    ("turn", "arguments"),
    [
        ("<calc>37+58</calc>", {"a": 37, "b": 58, "op": "+"}),
        ("<calc>-3-2</calc>", {"a": -3, "b": 2, "op": "-"}),
        ("<calc>37+58", None),
        ("95", None),
        ("", None),
        ("<calc>1/0</calc>", None),
    ],
)
def test_calls_are_parsed(turn, arguments):
    calls = calculator_task.CallParser().parse(turn)
    assert [call.arguments for call in calls] == ([] if arguments is None else [arguments])


def play(turns, problem=PROBLEM):
    """An episode of given turns: the agent, the rewards, and whether it is over after each."""
    columns = {"prompts": np.array([problem.prompt]), "answer": np.array([problem.answer])}
    environment = CalculatorEnvironment(columns, group_id=0, pair_index=0)
    agent = CalculatorAgent("")
    agent.update_from_env(environment.reset()[0], 0.0, False, {})
    rewards, done = [], []
    for turn in turns:
        action = agent.update_from_model(turn).action
        observation, reward, is_done, info = environment.step(action)
        agent.update_from_env(observation, reward, is_done, info)
        rewards.append(reward)
        done.append(is_done)
    return agent, rewards, done


def test_an_episode_with_the_tool():
    agent, rewards, done = play(["<calc>37+58</calc>", "<calc>95-21</calc>", "74"])
    assert rewards == [0.0, 0.0, 1.0]
    assert done == [False, False, True]
    text = ChatParser().parse(agent.chat_completions)
    assert text == "Q: 37+58-21= A:<calc>37+58</calc>| 95 <calc>95-21</calc>| 74 74|"


@pytest.mark.parametrize(
    "turns",
    [
        pytest.param(["75"], id="a guess"),
        pytest.param(["<calc>37+58</calc>", "95"], id="too few calls"),
        pytest.param(["<calc>37+58</calc>"] * MAX_TURNS, id="too many calls"),
    ],
)
def test_other_episodes_earn_nothing(turns):
    _, rewards, done = play(turns)
    assert sum(rewards) == 0
    assert done == [False] * (len(turns) - 1) + [True]


def test_text_of_a_conversation_encodes_to_what_was_sampled():
    tokenizer = Tokenizer()
    turn = "<calc>37+58</calc>"
    sampled = [*tokenizer.encode(turn), tokenizer.eos_id()]
    messages = [{"role": "assistant", "content": turn}, {"role": "tool", "content": "95"}]
    assert tokenizer.encode(ChatParser().parse(messages)) == sampled + tokenizer.encode(" 95 ")
    assert tokenizer.decode([tokenizer.eos_id()]) == END_OF_TURN


def test_the_tool_is_no_target_of_supervised_training():
    tokenizer = Tokenizer()
    batch = next(make_calculator_checkpoint.batches(8, 0.3, seed=0))
    assert batch.tokens.shape == batch.is_target.shape
    for ids, is_target in zip(batch.tokens, batch.is_target, strict=True):
        text = tokenizer.decode(ids.tolist())
        problem = Calculation.parse(text[: text.index("A:") + 2])
        *calls, answer, rest = tokenizer.decode(ids[is_target].tolist()).split(END_OF_TURN)
        done = problem.calls[: len(calls)]
        assert calls == [call for call, _ in done]
        assert rest == ""
        replies = "".join(f"{call}{END_OF_TURN} {result} " for call, result in done)
        assert text == f"{problem.prompt}{replies}{answer}{END_OF_TURN}"


def test_shipped_checkpoint():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    model = addition_task.load_checkpoint(CHECKPOINT, mesh, calculator_task.model_config())
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert CHECKPOINT.stat().st_size < 1.5e6
    metadata = addition_task.checkpoint_metadata(CHECKPOINT)
    assert metadata["maker"] == Path(make_calculator_checkpoint.__file__).name
    assert 0.1 < float(metadata["exact_match"]) < 0.7


def run(tmp_path, *options):
    config = tmp_path / "config.yaml"
    config.write_text("grpo: {prompts_per_step: 2, num_generations: 4, beta: 0.0}\n")
    arguments = ["--config", str(config), "--output-dir", str(tmp_path), *options]
    assert grpo_tools.main(arguments) == 0
    return json.loads((tmp_path / "records.json").read_text())


def check_masks(episode):
    """What is in brackets is what the calculator answers to the call before it, and no more."""
    prompt, _, completion = episode.partition("A: ")
    Calculation.parse(f"{prompt}A:")
    calls = re.findall(r"<calc>(\d+)([+-]\d+)</calc>\| \[ (-?\d+) \]", completion)
    assert [int(a) + int(b) for a, b, _ in calls] == [int(result) for *_, result in calls]
    assert completion.count("[") == completion.count("]") == len(calls)
    assert completion.endswith(END_OF_TURN)
    return len(calls)


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Tunix uses deprecated parts of JAX.
def test_two_steps(tmp_path, capsys):
    content = run(tmp_path, "--steps", "2", "--seed", "3")
    assert content["settings"]["seed"] == 3
    assert [step["step"] for step in content["steps"]] == [1, 2]
    for step in content["steps"]:
        assert 0 <= step["reward"] <= 1
        assert 1 < step["turns"] <= MAX_TURNS
        # Group mates share the question, and a turn begins with what the turns before it held.
        assert 0.6 < step["cached"] < 1
    assert check_masks(content["episode"]) > 0
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "step 2/2" in printed
    assert content["episode"] in printed


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_without_the_prefix_cache_nothing_comes_from_it(tmp_path):
    content = run(tmp_path, "--steps", "1", "--no-prefix-cache")
    assert [step["cached"] for step in content["steps"]] == [0.0]
