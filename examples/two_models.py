"""Two models take turns on one device, each in the middle of its requests.

    python examples/two_models.py

Two engines get all their requests at once. Then one of them generates for a while and goes to
sleep with `preserve_state=True`: weights, KV pages in use and prefix cache move to the host, and
the other one has the device. No request notices: the program compares all outputs with those of
runs of the same engines that nothing interrupted, and prints what the device holds in each turn.
The models are tiny and their weights random, so this takes seconds on a CPU.
"""

from __future__ import annotations

import no_advice as no_advice  # isort: skip

import argparse
import dataclasses
import functools
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import jax
import numpy as np

from sgljax_engine import Engine, ModelConfig, RequestOutput, RopeConfig, SamplingParams

LARGE = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rope=RopeConfig(theta=1e6),
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    context_length=256,
)
SMALL = dataclasses.replace(LARGE, hidden_size=64, intermediate_size=128, num_layers=2)
PROMPT_LEN = 12


class Player(NamedTuple):
    """An engine and what it is asked for."""

    name: str
    engine: Engine
    prompts: list[list[int]]
    sampling_params: list[SamplingParams]

    def generate(self) -> list[RequestOutput]:
        """All outputs; waits while the engine sleeps."""
        return self.engine.generate_requests(self.prompts, self.sampling_params)


class Turn(NamedTuple):
    """What one engine did while it had the device.

    Attributes:
        name: Of the player.
        num_tokens: Tokens that it generated.
        num_unfinished: Requests that it had left when it went to sleep.
        held_bytes: What all arrays on the device took before it went to sleep, those of the
            dispatch in flight included.
        own_bytes: What of that was its own: weights and KV cache.
        left_bytes: What was left on the device when it slept.
    """

    name: str
    num_tokens: int
    num_unfinished: int
    held_bytes: int
    own_bytes: int
    left_bytes: int


class Report(NamedTuple):
    """A whole run.

    Attributes:
        turns: In their order.
        base_bytes: On the device without either engine.
        outputs: Token ids of all requests by the name of the player.
        uninterrupted: The same of runs that nothing interrupted.
    """

    turns: list[Turn]
    base_bytes: int
    outputs: dict[str, list[list[int]]]
    uninterrupted: dict[str, list[list[int]]]


def device_bytes() -> int:
    """Bytes of all arrays of this process that are on a device, not in a host's memory."""
    kind = jax.devices()[0].default_memory().kind
    return sum(x.nbytes for x in jax.live_arrays() if x.sharding.memory_kind == kind)


def make_player(
    name: str, model: ModelConfig, *, seed: int, num_requests: int, max_new_tokens: int
) -> Player:
    """An engine with random weights, and prompts and seeds for its requests."""
    rng = np.random.default_rng(seed)
    engine = Engine(
        model_config=model,
        load_format="dummy",
        random_seed=seed,
        max_running_requests=8,
        batch_buckets=(8,),  # few programs to compile
        token_buckets=(128,),
        chunked_prefill_size=128,
        decode_steps=2,  # short dispatches, so that turns can be short
    )
    return Player(
        name,
        engine,
        rng.integers(1, model.vocab_size, (num_requests, PROMPT_LEN)).tolist(),
        [SamplingParams(seed=i, max_new_tokens=max_new_tokens) for i in range(num_requests)],
    )


def run_alone(player: Player) -> list[list[int]]:
    """The outputs of a run without interruptions. The engine sleeps afterwards, and is as new."""
    outputs = player.generate()
    player.engine.flush_cache()
    player.engine.sleep()
    return [output.output_ids for output in outputs]


def take_turn(player: Player, answer: Future[list[RequestOutput]], num_tokens: int) -> Turn:
    """Lets a sleeping engine generate about so many tokens more, or to the end."""
    engine = player.engine
    before = engine.get_internal_state().counters.num_output_tokens
    engine.wake_up()
    while True:
        state = engine.get_internal_state()  # comes between two dispatches
        done = state.counters.num_output_tokens - before
        if done >= num_tokens or answer.done():
            break
    held = device_bytes()
    own = engine.sleep(preserve_state=True)
    state = engine.get_internal_state()
    num_unfinished = state.running_batch_size + state.waiting_queue_size
    if not num_unfinished:
        answer.result()  # which is on its way
    return Turn(
        name=player.name,
        num_tokens=state.counters.num_output_tokens - before,
        num_unfinished=num_unfinished,
        held_bytes=held,
        own_bytes=own,
        left_bytes=device_bytes(),
    )


def alternate(
    players: Sequence[Player], tokens_per_turn: int
) -> tuple[list[Turn], dict[str, list[list[int]]]]:
    """Has sleeping engines take turns until all requests of all of them are answered."""
    turns: list[Turn] = []
    with ThreadPoolExecutor(len(players)) as pool:
        answers = [pool.submit(player.generate) for player in players]
        try:
            while not all(answer.done() for answer in answers):
                for player, answer in zip(players, answers, strict=True):
                    if not answer.done():
                        turns.append(take_turn(player, answer, tokens_per_turn))
        except BaseException:  # nobody would wake those that sleep, and the pool waits for them
            for player in players:
                player.engine.shutdown()
            raise
        outputs = {
            player.name: [output.output_ids for output in answer.result()]
            for player, answer in zip(players, answers, strict=True)
        }
    return turns, outputs


def run(num_requests: int, max_new_tokens: int, tokens_per_turn: int) -> Report:
    """Makes both engines, runs them one after the other, then in turns."""
    base_bytes = device_bytes()
    make = functools.partial(make_player, num_requests=num_requests, max_new_tokens=max_new_tokens)
    players: list[Player] = []
    uninterrupted: dict[str, list[list[int]]] = {}
    try:
        for name, model, seed in (("large", LARGE, 1), ("small", SMALL, 2)):
            players.append(make(name, model, seed=seed))
            uninterrupted[name] = run_alone(players[-1])  # sleeps before the next one is made
        turns, outputs = alternate(players, tokens_per_turn)
    finally:
        for player in players:
            player.engine.shutdown()
    return Report(turns, base_bytes, outputs, uninterrupted)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Returns the command line's options."""
    parser = argparse.ArgumentParser(description="Two models take turns on one device.")
    parser.add_argument("--requests", type=int, default=6, help="of each model")
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--tokens-per-turn", type=int, default=300, help="of all requests together")
    args = parser.parse_args(argv)
    for name, value in vars(args).items():
        if value < 1:
            parser.error(f"{name} must be at least 1, got {value}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Runs the program and returns its exit code: 1 if an output differs."""
    args = parse_args(argv)
    report = run(args.requests, args.max_new_tokens, args.tokens_per_turn)
    print("turn  model  tokens  unfinished  KB on the device  of them its own  left asleep")
    for i, turn in enumerate(report.turns, 1):
        held, own, left = (
            f"{num / 1000:,.0f}" for num in (turn.held_bytes, turn.own_bytes, turn.left_bytes)
        )
        print(
            f"{i:4}  {turn.name:5}  {turn.num_tokens:6}  {turn.num_unfinished:10}"
            f"  {held:>16}  {own:>15}  {left:>11}"
        )
    is_same = report.outputs == report.uninterrupted
    print(
        f"outputs of {2 * args.requests} requests "
        f"{'equal' if is_same else 'DIFFER FROM'} those of uninterrupted runs"
    )
    return int(not is_same)


if __name__ == "__main__":
    sys.exit(main())
