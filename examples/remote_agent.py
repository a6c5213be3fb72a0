"""The agent of `grpo_remote_agent.py`: plays calculator episodes against the policy, over HTTP.

It imports neither JAX nor the engine, and could run on another machine: it knows the task, owns the
tool and the reward, and calls the policy through OpenAI's client, which takes the address and the
key from OPENAI_BASE_URL and OPENAI_API_KEY.

A line of stdin is a task, `{"id": 7, "problem": "Q: 37+58-21= A:"}`. A line of stdout is a finished
episode: its id, its reward and its turns, each with the ids of its prompt and of what was sampled,
the log-probs and weight versions of those, their text, and what the tool answered. The agent ends
when stdin ends, or with the first error.
"""

from __future__ import annotations

import no_advice as no_advice  # isort: skip

import asyncio
import json
import sys
import traceback
from typing import Any

import openai

from calculator import MAX_RESPONSE_LENGTH, MAX_TURNS, Calculation, Call, Tokenizer

TOKENIZER = Tokenizer()


async def take_turn(client: openai.AsyncOpenAI, prompt: list[int], room: int) -> dict[str, Any]:
    """Has the policy continue the conversation.

    A conversation stays the very tokens that were sampled, since ids go both ways: text that is
    encoded again may become other tokens.

    Args:
        client: OpenAI's client.
        prompt: Ids of the conversation so far.
        room: Tokens that the turn may have.
    """
    completion = await client.completions.create(
        model="policy",
        prompt=prompt,
        max_tokens=room,
        temperature=1.0,  # only here are log-probs of HTTP replies those of Tunix's trainer
        logprobs=0,  # those of the sampled tokens alone
        extra_body={"return_token_ids": True, "return_weight_versions": True},
    )
    choice = completion.choices[0].model_dump()
    return {
        "prompt_ids": choice["prompt_token_ids"],
        "ids": choice["token_ids"],
        "logprobs": choice["logprobs"]["token_logprobs"],
        "versions": choice["weight_versions"],
        "text": choice["text"],
        "tool": None,
    }


async def play(client: openai.AsyncOpenAI, problem: str) -> dict[str, Any]:
    """Plays an episode; returns its turns and its reward, 1 for the right answer."""
    prompt = [TOKENIZER.bos_id(), *TOKENIZER.encode(problem)]
    limit = len(prompt) + MAX_RESPONSE_LENGTH
    turns: list[dict[str, Any]] = []
    while len(turns) < MAX_TURNS and len(prompt) < limit:
        turn = await take_turn(client, prompt, limit - len(prompt))
        turns.append(turn)
        prompt = turn["prompt_ids"] + turn["ids"]
        if len(prompt) >= limit:  # it used its room up: no answer
            break
        call = Call.find(turn["text"])
        if call is None:
            answer = Calculation.parse(problem).answer
            return {"turns": turns, "reward": float(turn["text"] == answer)}
        turn["tool"] = f" {call.result} "
        prompt = prompt + TOKENIZER.encode(turn["tool"])
    return {"turns": turns, "reward": 0.0}


async def answer_task(client: openai.AsyncOpenAI, line: bytes) -> None:
    """Plays the task of a line, and writes the line of its episode."""
    task = json.loads(line)
    episode = await play(client, task["problem"])
    print(json.dumps({"id": task["id"], **episode}), flush=True)


async def main() -> None:
    """Plays all tasks of stdin at once; what is open when stdin ends is given up."""
    tasks = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(tasks), sys.stdin
    )
    async with openai.AsyncOpenAI() as client, asyncio.TaskGroup() as group:
        episodes = [group.create_task(answer_task(client, line)) async for line in tasks]
        for episode in episodes:
            episode.cancel()


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except ExceptionGroup as group:  # of the episodes: one tells enough
        traceback.print_exception(group.exceptions[0])
        sys.exit(1)
