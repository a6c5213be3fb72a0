"""The calculator task: sums and differences that the policy works out with a tool.

The policy is asked `Q: 37+58-21= A:` and may call a calculator, one operation a turn, before it
answers in a turn of its own:

    policy  <calc>37+58</calc>|
    tool     95
    policy  <calc>95-21</calc>|
    tool     74
    policy  74|

Only the answer is rewarded. The parts are Tunix's own: its ToolEnvironment runs its
CalculatorTool, and the agent is its ToolAgent with a parser for calls as short as these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import grain
import numpy as np
from tunix.models.qwen3 import model as qwen3
from tunix.rl.agentic.agents.tool_agent import ToolAgent
from tunix.rl.agentic.environments.tool_environment import ToolEnvironment
from tunix.rl.agentic.parser.tool_parser.tool_parser_base import ToolParser
from tunix.rl.agentic.tools.base_tool import BaseTool, ToolCall
from tunix.rl.agentic.tools.calculator_tool import CalculatorTool

from addition_task import batches_of
from calculator import END_OF_TURN, MAX_TURNS, NUM_OPERATIONS, Calculation, Call, Tokenizer

LOWEST, HIGHEST = 10, 99  # of all numbers, results included
TOOLS: dict[str, type[BaseTool]] = {"calculator": CalculatorTool}


def sample_problem(rng: np.random.Generator) -> Calculation:
    """Returns a problem in which all numbers and results have two digits.

    So everything that is to be copied stands at a fixed distance, which a tiny policy learns in
    minutes.
    """
    total = first = int(rng.integers(LOWEST, HIGHEST + 1))
    others = []
    for _ in range(NUM_OPERATIONS):
        results = [r for r in range(LOWEST, HIGHEST + 1) if abs(r - total) >= LOWEST]
        result = int(rng.choice(results))
        others.append(result - total)
        total = result
    return Calculation(first, tuple(others))


def problem_batches(num_batches: int, batch_size: int, seed: int) -> grain.MapDataset:
    """Returns batches for Tunix's learners: arrays of `prompts` and of each one's `answer`."""
    return batches_of(sample_problem, num_batches, batch_size, seed)


class CallParser(ToolParser):
    """Finds `<calc>37+58</calc>` in a turn."""

    def parse(self, model_response: str) -> list[ToolCall]:
        """Returns the turn's call; none if the turn is anything else, hence an answer."""
        call = Call.find(model_response)
        return [] if call is None else [ToolCall(name="calculator", arguments=call._asdict())]

    def get_tool_prompt(
        self, tools: list[BaseTool], *, schema_style: Literal["openai", "mcp", "gemini"] = "openai"
    ) -> str:
        """Returns "": the policy has learnt the calls."""
        del tools, schema_style
        return ""


class CalculatorAgent(ToolAgent):
    """Tunix's ToolAgent with our calls, and with the messages that our columns and tools give.

    (Tunix's own looks for the question in a column `question`, but its learner needs `prompts`.)
    """

    def __init__(self, system_prompt: str) -> None:
        super().__init__(system_prompt, tool_map=TOOLS)
        self.tool_parser = CallParser()

    def _init_messages(self, system_prompt: str) -> None:
        del system_prompt
        self._messages: list[dict[str, Any]] = []

    def _observation_to_messages(
        self, observation: Any, reward: float, done: bool, info: dict[str, Any]
    ) -> None:
        del reward, done, info
        if "prompts" in observation:
            # Tunix hands the question over as an array of one string.
            self._messages.append({"role": "user", "content": str(observation["prompts"].item())})
        for output in observation.get("tool_outputs", {}).values():
            self._messages.append({"role": "tool", "content": output})


class CalculatorEnvironment(ToolEnvironment):
    """Tunix's ToolEnvironment with a calculator, and 1 for the right answer."""

    def __init__(self, task: dict[str, Any], *, group_id: int, pair_index: int) -> None:
        super().__init__(
            task,
            tool_map=TOOLS,
            reward_fn=judge,
            max_steps=MAX_TURNS,
            group_id=group_id,
            pair_index=pair_index,
        )


def judge(task: dict[str, Any], action: str) -> float:
    """Returns 1 for the right answer, else 0."""
    return float(action == str(np.asarray(task["answer"]).item()))


class ChatParser:
    """The chat template: turns of the policy end with `END_OF_TURN`, results stand in spaces."""

    def parse(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = False,
        is_first_msg: bool = False,
    ) -> str:
        """Returns the messages as one text."""
        del add_generation_prompt, is_first_msg
        templates = {"user": "{}", "assistant": f"{{}}{END_OF_TURN}", "tool": " {} "}
        return "".join(
            templates[message["role"]].format(message["content"]) for message in messages
        )

    def update_assistant_end_tokens(self, tokens: np.ndarray) -> tuple[np.ndarray, int]:
        """Returns sampled tokens with what the template puts behind them: nothing.

        Releases of Tunix after 0.1.7 ask for it.
        """
        return tokens, 0


def model_config() -> qwen3.ModelConfig:
    """Returns the policy's shape: a Qwen3 of 0.08 million parameters."""
    return qwen3.ModelConfig(
        num_layers=2,
        vocab_size=Tokenizer.vocab_size,
        embed_dim=64,
        hidden_dim=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        norm_eps=1e-6,
        rope_theta=1_000_000,
        use_tied_embedding=True,
    )
