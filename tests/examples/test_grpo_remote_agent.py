"""The example whose agent is another process: what it trains on, and how it ends."""

import asyncio
import copy
import logging
import signal
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import psutil
import pytest

import grpo_remote_agent
from agent_process import AgentError, AgentProcess
from agentic_parts import GrpoSettings
from calculator import MAX_RESPONSE_LENGTH, MAX_TURNS, Tokenizer
from grpo_remote_agent import assert_exact, train
from grpo_tools import Settings
from remote_steps import RemoteStep
from sgljax_engine.server.generation import Generation
from tests.threads import LIMIT_S, start, wait_for
from tunix_sgljax import SglJaxRollout
from tunix_sgljax.cli.interrupt import Interrupts

QUICK_COMPILE = "that the example runs and what it reports"

EXAMPLES = Path(grpo_remote_agent.__file__).parent
SHORT = Settings(
    steps=3, off_policy_steps=1, grpo=GrpoSettings(prompts_per_step=2, num_generations=8)
)


def program(*lines):
    """The command of an agent that is a few lines of Python."""
    return [sys.executable, "-c", "\n".join(("import json, os, sys", *lines))]


def lose_the_agent():
    with AgentProcess(program("sys.exit(3)"), {}) as agent:
        agent.play("one")


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        (lambda: None, 0, "mean reward of the first ten steps 0.500, of the last ten 0.500"),
        (lose_the_agent, 1, "error: the agent ended with exit code 3"),
        (lambda: signal.raise_signal(signal.SIGINT), 130, "interrupted"),
    ],
)
def test_main(monkeypatch, capsys, end, code, said):
    step = RemoteStep(step=1, reward=0.5, turns=2.25, lag=0.75, mixed=0.5, step_s=2.0)

    def train(settings, on_step):
        assert settings.steps == 2
        on_step(step)
        end()
        return [step]

    monkeypatch.setattr(grpo_remote_agent, "train", train)
    monkeypatch.setattr(logging.getLogger("asyncio"), "setLevel", lambda level: None)
    assert grpo_remote_agent.main(["--steps", "2"]) == code
    shown = capsys.readouterr()
    line = "step 1/2  reward 0.500  turns 2.25  weight lag 0.75  mixed 50%  2.00 s\n"
    assert line in shown.out
    assert said in (shown.err if code else shown.out)


def test_the_agent_imports_neither_jax_nor_the_engine():
    code = "import sys, remote_agent; print({'jax', 'tunix', 'sgljax_engine'} & {*sys.modules})"
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=EXAMPLES, capture_output=True, text=True, check=True
    )
    assert shown.stdout == "set()\n"


class TestAgentProcess:
    def test_episodes_come_back_in_any_order(self):
        both = "tasks = [json.loads(sys.stdin.readline()) for _ in range(2)]"
        write = "[print(json.dumps({**task, 'reward': 1}), flush=True) for task in tasks[::-1]]"
        with AgentProcess(program(both, write, "sys.stdin.read()"), {}) as agent:
            calls = [start(lambda name=name: agent.play(name)) for name in ("one", "two")]
            episodes = [call.result(LIMIT_S) for call in calls]
        assert episodes == [{"problem": name, "reward": 1} for name in ("one", "two")]

    @pytest.mark.parametrize(
        ("lines", "message"),
        [
            (["sys.stdin.readline()", "os._exit(3)"], "the agent ended with exit code 3"),
            (["sys.stdin.readline()", "print('hello')"], r"wrote 'hello\\n', which is no episode"),
            (["sys.stdin.readline()", "print('{\"id\": 9}')"], "no episode of an open task"),
        ],
    )
    def test_an_agent_that_fails(self, lines, message):
        with AgentProcess(program(*lines), {}) as agent:
            with pytest.raises(AgentError, match=message):
                agent.play("one")
            with pytest.raises(AgentError, match=message):
                agent.play("two")

    def test_closing_ends_it_and_those_who_wait(self):
        agent = AgentProcess(program("sys.stdin.read()"), {})
        call = start(lambda: agent.play("one"))
        wait_for(lambda: bool(agent._open))
        agent.close()
        with pytest.raises(AgentError, match="the agent was closed"):
            call.result(LIMIT_S)
        assert agent._process.returncode == 0
        agent.close()


def test_inexact_rows_are_found():
    turn = {"prompt_ids": [1, 5], "ids": [6, 7], "logprobs": [-0.5, -1.5], "versions": [0, 1]}
    episode = {"turns": [turn], "reward": 1.0}
    sampled = [[True] * 2 + [False] * (MAX_RESPONSE_LENGTH - 2)]
    rest = [0] * (MAX_RESPONSE_LENGTH - 2)
    example = SimpleNamespace(
        prompt_ids=np.array([[0, 1, 5]]),
        completion_ids=np.array([[6, 7, *rest]]),
        completion_mask=np.array(sampled),
        old_per_token_logps=np.array([[-0.5, -1.5, *rest]], np.float32),
        token_versions=np.array([[0, 1, *rest]]),
    )
    assert_exact(example, [episode])
    for name, change in (
        ("prompt_ids", [1, 4]),
        ("ids", [6, 8]),
        ("logprobs", [-0.5, np.nextafter(np.float32(-1.5), np.float32(0))]),
        ("versions", [0, 0]),
    ):
        other = copy.deepcopy(episode)
        other["turns"][0][name] = change
        with pytest.raises(AssertionError):
            assert_exact(example, [other])


class Ends(NamedTuple):
    states: list
    processes_before: set


@pytest.fixture
def ends(monkeypatch):
    """Its engine's state when a rollout is closed, without the prefix cache; child processes."""
    ends = Ends(states=[], processes_before={*psutil.Process().children()})
    close = SglJaxRollout.close

    def look_and_close(self):
        state = self.engine.get_internal_state
        wait_for(lambda: not state().running_batch_size and not state().waiting_rids)
        self.engine.flush_cache()
        ends.states.append(state())
        close(self)

    monkeypatch.setattr(SglJaxRollout, "close", look_and_close)
    return ends


def assert_nothing_left(ends):
    (state,) = ends.states
    assert state.available_kv_tokens == state.total_kv_tokens
    assert {*psutil.Process().children()} <= ends.processes_before


def agent_with(*lines):
    """The command of the example's agent with some of its parts replaced."""
    return program(
        f"sys.path.insert(0, {str(EXAMPLES)!r})",
        "import asyncio, itertools, remote_agent",
        *lines,
        "asyncio.run(remote_agent.main())",
    )


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Tunix uses deprecated parts of JAX.
def test_three_steps(ends, monkeypatch):
    """Episodes of the first batch hold their later turns until the other has updated the policy.

    One in four of the turns after a tool's answer does not end before its room is used up.
    """
    updated = Future()
    generate = Generation.generate
    (batch,) = grpo_remote_agent.problem_batches(1, SHORT.grpo.prompts_per_step, SHORT.seed)
    held = [[1, *Tokenizer().encode(prompt)] for prompt in batch["prompts"]]

    async def generate_later(self, request, job):
        (ids,) = job.input_ids
        if any(ids != prompt == ids[: len(prompt)] for prompt in held):  # not computed
            await asyncio.shield(asyncio.wrap_future(updated))
        return await generate(self, request, job)

    def check(example, episodes):
        assert_exact(example, episodes)
        checked.extend(episodes)

    def end_step(step):
        if not updated.done():
            updated.set_result(None)

    checked = []
    monkeypatch.setattr(Generation, "generate", generate_later)
    monkeypatch.setattr(grpo_remote_agent, "assert_exact", check)
    agent = agent_with(
        "calls = itertools.count()",
        "create = remote_agent.openai.resources.AsyncCompletions.create",
        "async def create_some_long(self, *, prompt, extra_body, **options):",
        "    is_long = len(prompt) > 16 and next(calls) % 4 == 0",
        "    extra_body = {**extra_body, 'ignore_eos': is_long}",
        "    return await create(self, prompt=prompt, extra_body=extra_body, **options)",
        "remote_agent.openai.resources.AsyncCompletions.create = create_some_long",
    )
    steps = train(SHORT, end_step, agent)

    assert [step.step for step in steps] == [1, 2, 3]
    assert (steps[0].lag, steps[0].mixed) == (0, 0)
    assert steps[1].mixed > 0  # first turns are of the first policy, held ones of the second
    assert 0 < steps[1].lag < 1
    for step in steps:
        assert 0 <= step.reward <= 1
        assert 1 < step.turns <= MAX_TURNS
    assert len(checked) == 3 * 2 * 8
    lengths = [[len(turn["prompt_ids"] + turn["ids"]) for turn in e["turns"]] for e in checked]
    assert max(map(max, lengths)) == len(held[0]) + MAX_RESPONSE_LENGTH
    assert_nothing_left(ends)


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_agent_that_dies_ends_the_training(ends):
    agent = agent_with(
        "play, played = remote_agent.play, itertools.count()",
        "async def play_40(client, problem):",
        "    if next(played) == 40: os._exit(5)  # the first update was there before the 33rd",
        "    return await play(client, problem)",
        "remote_agent.play = play_40",
    )
    steps = []
    with pytest.raises(AgentError, match="the agent ended with exit code 5"):
        train(SHORT, steps.append, agent)
    assert len(steps) in (1, 2)
    assert_nothing_left(ends)


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_interrupt_ends_everything(ends):
    with Interrupts(), pytest.raises(AgentError, match="the agent was closed"):
        train(SHORT, lambda step: signal.raise_signal(signal.SIGINT))
    assert_nothing_left(ends)
