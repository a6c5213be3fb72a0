"""`tunix-sgljax generate`: completes prompts with a model in a Hugging Face folder."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sgljax_engine import EngineError, InvalidRequestError, SamplingParams
from tunix_sgljax.cli.answers import JsonlWriter, Summary, TextWriter, Writer
from tunix_sgljax.cli.engine_options import (
    add_engine_options,
    engine_config,
    model_folder,
    read_pairs,
)
from tunix_sgljax.cli.interrupt import EXIT_INTERRUPTED, current
from tunix_sgljax.cli.output import emit, say
from tunix_sgljax.cli.prompts import Prompt, as_chat, read_prompts
from tunix_sgljax.cli.sampling_options import add_sampling_options, given_fields

if TYPE_CHECKING:
    from sgljax_engine import Engine

SUMMARY = "Complete prompts with a model in a Hugging Face folder."

EXAMPLES = """examples:
  tunix-sgljax generate --model Qwen3-0.6B "The capital of France is"
  tunix-sgljax generate --model Qwen3-0.6B --chat --temperature 0 "Count to ten."
  tunix-sgljax generate --model Qwen3-0.6B --input prompts.txt --output answers.jsonl
  tunix-sgljax generate --model Qwen3-0.6B --input chats.jsonl --n 4 --logprobs --output out.jsonl
  echo "Once upon a time" | tunix-sgljax generate --model Qwen3-0.6B --engine dtype=float32

A line of JSON has "prompt", "messages" or "input_ids", and may have "id" and "sampling_params".
The answers go to stdout, one alone as it is written, or to --output, a JSON object for each."""

_MAX_RUNNING = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="what to complete")
    parser.add_argument("--model", required=True, metavar="FOLDER", help="a Hugging Face folder")
    parser.add_argument("--input", metavar="FILE", help="a prompt a line; - for stdin (default)")
    parser.add_argument("--jsonl", action="store_true", help="the lines are JSON objects")
    parser.add_argument("--output", metavar="FILE", help="write answers there, as lines of JSON")
    parser.add_argument(
        "--keep-order",
        action="store_true",
        help="write answers to --output in the order of the prompts, not as they finish",
    )
    parser.add_argument("--chat", action="store_true", help="send prompts as messages of a user")
    parser.add_argument("--system", metavar="TEXT", help="the system message; implies --chat")
    parser.add_argument(
        "--template",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a variable of the chat template: enable_thinking=false, ...",
    )
    parser.add_argument(
        "--logprobs", action="store_true", help="write the log-prob of each token to --output"
    )
    parser.add_argument(
        "--top-logprobs",
        type=int,
        default=0,
        metavar="N",
        help="write the N most likely tokens of each position to --output too",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress and no summary")
    add_sampling_options(parser)
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Generates; returns 1 when prompts were refused, 130 when interrupted."""
    folder = model_folder(args.model)
    if args.output is None and (args.logprobs or args.top_logprobs or args.keep_order):
        raise InvalidRequestError("--logprobs, --top-logprobs and --keep-order need --output")
    sampling = given_fields(args)
    SamplingParams.from_dict(sampling)  # refused before a model is loaded
    if not args.prompts and args.input is None and sys.stdin.isatty():
        say("reading prompts from the terminal, one a line; end with Ctrl-D")
    prompts = read_prompts(args.prompts, args.input, args.jsonl)
    if args.chat or args.system is not None:
        prompts = [as_chat(prompt, args.system) for prompt in prompts]
    num_samples = len(prompts) * int(sampling.get("n", 1))
    config = engine_config(args, {"max_running_requests": min(num_samples, _MAX_RUNNING)})

    from sgljax_engine import Engine
    from tunix_sgljax.observability.progress import Progress

    progress = Progress(False if args.quiet else None)
    start = time.perf_counter()
    with Engine(folder, config=config, progress=progress) as engine:
        if not args.quiet:
            say(f"loaded {folder} in {time.perf_counter() - start:.1f} s")
        job = _Job(engine, args, sampling)
        summary = Summary()
        if len(prompts) == 1 and num_samples == 1 and args.output is None:
            stream_one(job, prompts[0], summary)
        else:
            # Texts on the same terminal would break the bar.
            has_bar = args.output is not None
            bar = progress.rollout(engine, num_samples) if has_bar else contextlib.nullcontext()
            with contextlib.closing(_writer(args, len(prompts))) as writer, bar:
                asyncio.run(generate_all(job, prompts, writer, summary))
        if not args.quiet:
            say(summary.in_words(engine.get_internal_state()))
    if current().is_interrupted:
        return EXIT_INTERRUPTED
    return 1 if summary.num_refused else 0


@dataclasses.dataclass(frozen=True)
class _Job:
    engine: Engine
    args: argparse.Namespace
    sampling: dict[str, Any]

    def request(self, prompt: Prompt) -> dict[str, Any]:
        request: dict[str, Any] = {}
        if prompt.messages is not None:
            options = read_pairs("--template", self.args.template)
            ids = self.engine.apply_chat_template(prompt.messages, template_options=options)
            request["input_ids"] = ids
        elif prompt.input_ids is not None:
            request["input_ids"] = prompt.input_ids
        else:
            request["prompt"] = prompt.text
        request["sampling_params"] = self._params(prompt, request.get("input_ids"))
        if self.args.logprobs or self.args.top_logprobs:
            request["return_logprob"] = True
        if self.args.top_logprobs:
            request["top_logprobs_num"] = self.args.top_logprobs
        return request

    def _params(self, prompt: Prompt, input_ids: Sequence[int] | None) -> SamplingParams:
        defaults = self.engine.get_default_sampling_params()
        given = {**self.sampling, **prompt.sampling}
        if prompt.messages is not None:  # as `Engine.chat`
            given.setdefault("decode_behind_prompt", False)
        if defaults.max_new_tokens is not None and given.get("max_new_tokens") is None:
            # Nobody asked for the folder's number: it is cut to what fits.
            ids = self.engine.tokenize(prompt.text or "") if input_ids is None else input_ids
            num_ids = len(ids) if isinstance(ids, list) else 0  # the engine refuses what is none
            limit = max(1, self.engine.max_new_tokens(num_ids))
            given["max_new_tokens"] = min(defaults.max_new_tokens, limit)
        return defaults.override(given)


def stream_one(job: _Job, prompt: Prompt, summary: Summary) -> None:
    """Writes the text of one answer to stdout as it is generated; Ctrl-C cuts it short."""
    text, abort = "", functools.partial(job.engine.abort_request, abort_all=True)
    with current().on_interrupt(abort):
        for piece in job.engine.generate(**job.request(prompt), stream=True):
            text += piece["text"]
            emit(piece["text"], end="")
            if piece["meta_info"]["finish_reason"] is not None:
                summary.add(piece)
            elif current().is_interrupted:  # and maybe was before there was a request to abort
                abort()
    if not text.endswith("\n"):
        emit("")


async def generate_all(
    job: _Job, prompts: Sequence[Prompt], writer: Writer, summary: Summary
) -> None:
    """Submits all prompts at once, and passes each answer to the writer when it arrives.

    A refused prompt gets an answer with the reason; the others continue. Ctrl-C ends all with their
    output so far; prompts that were not submitted get no answer.
    """
    loop = asyncio.get_running_loop()
    abort = functools.partial(job.engine.async_abort_request, abort_all=True)

    async def answer(index: int, prompt: Prompt) -> None:
        if current().is_interrupted:
            summary.num_not_started += 1
            return
        try:
            outputs = await job.engine.async_generate(**job.request(prompt))
        except (EngineError, ValueError) as error:
            summary.num_refused += 1
            writer.refuse(index, prompt, error)
            return
        outputs = outputs if isinstance(outputs, list) else [outputs]
        for output in outputs:
            summary.add(output)
        writer.write(index, prompt, outputs)

    # On the loop's thread, so that no request slips in between this and the check of the flag.
    with current().on_interrupt(lambda: asyncio.run_coroutine_threadsafe(abort(), loop)):
        await asyncio.gather(*(answer(index, prompt) for index, prompt in enumerate(prompts)))


def _writer(args: argparse.Namespace, num_prompts: int) -> Writer:
    if args.output is None:
        return TextWriter(num_prompts)
    return JsonlWriter(args.output, keep_order=args.keep_order)
