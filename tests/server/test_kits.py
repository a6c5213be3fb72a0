"""Conversations with a tool, two turns each, through the clients and agent kits that people use."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

pytestmark = pytest.mark.slow

QUESTION = "How much is it?"
CALL = (
    '<think>I must add.</think>I add.\n<tool_call>\n{"name": "add", "arguments": '
    '{"x": 1, "y": "2", "unit": "\u5143"}}\n</tool_call>'
)
ANSWER = "It is 3 \u5143."
SETTINGS: dict[str, Any] = {"temperature": 0, "max_tokens": len(CALL) + 8}
BODY = {"logit_bias": {"1": -100, "4": -100}}
"""The model goes on; `ignore_eos` does not go with tools that a kit makes strict."""


@pytest.fixture
def added(tokenizer):
    """What the tool was called with; it makes the model answer."""
    tokenizer.text = CALL
    calls: list[Any] = []
    yield calls
    tokenizer.text = ""


def make_add(tokenizer, calls):
    def add(x: int, y: int, unit: str | None = None) -> str:
        """Adds two numbers."""
        calls.append((x, y, unit))
        tokenizer.text = ANSWER
        return f"{x + y} {unit}"

    return add


def run_agent(scripted, run) -> str:
    """What an agent answers; its client is closed in the loop that it was used in."""

    async def with_client() -> str:
        url = f"{scripted.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            return await run(client)

    return asyncio.run(with_client())


@pytest.mark.parametrize("is_streamed", [False, True])
def test_openai_agents(scripted, tokenizer, added, is_streamed):
    import agents

    agents.set_tracing_disabled(True)

    async def run(client: openai.AsyncOpenAI) -> str:
        agent = agents.Agent(
            name="adder",
            model=agents.OpenAIChatCompletionsModel(model="policy", openai_client=client),
            model_settings=agents.ModelSettings(extra_body=BODY, **SETTINGS),
            tools=[agents.function_tool(make_add(tokenizer, added))],
        )
        if not is_streamed:
            return (await agents.Runner.run(agent, QUESTION)).final_output
        result = agents.Runner.run_streamed(agent, QUESTION)
        async for _ in result.stream_events():
            pass
        return result.final_output

    assert run_agent(scripted, run) == ANSWER
    assert added == [(1, 2, "\u5143")]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_pydantic_ai(scripted, tokenizer, added, is_streamed):
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def drain(_: Any, events: Any) -> None:
        async for _ in events:
            pass

    async def run(client: openai.AsyncOpenAI) -> str:
        settings: Any = {**SETTINGS, "extra_body": BODY}
        agent = Agent(
            OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=client)),
            tools=[make_add(tokenizer, added)],
            model_settings=settings,
        )
        handler = drain if is_streamed else None  # one makes it stream
        return (await agent.run(QUESTION, event_stream_handler=handler)).output

    assert run_agent(scripted, run) == ANSWER
    assert added == [(1, 2, "\u5143")]
