"""OpenAI's `/v1/completions`."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from sgljax_engine import InvalidRequestError
from sgljax_engine.server.context import ServerContext
from sgljax_engine.server.generation import Job, PieceStream, new_rids
from sgljax_engine.server.openai import parts
from sgljax_engine.server.openai.parts import Output
from sgljax_engine.server.openai.schemas import CompletionRequest
from sgljax_engine.server.prepared import prepared, written
from sgljax_engine.server.replies import EventStream, event, reply
from sgljax_engine.server.routes import OpenAIRoute

_DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


def completion_routes(context: ServerContext) -> APIRouter:
    """The route."""
    router = APIRouter(route_class=OpenAIRoute)
    engine, generation = context.engine, context.generation

    @router.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continues prompts, given as text or as token ids."""
        call = await prepared(request, context, lambda: _Call(context, body))
        if body.stream:
            pieces = await generation.stream(request, call.job)
            return EventStream(call.events(pieces), pieces, engine.weight_version)
        outputs = await generation.run(request, call.job)
        version = parts.last_version(engine, outputs)
        return await written(context, outputs, lambda: reply(call.answer(outputs), version))

    return router


@dataclasses.dataclass
class _Progress:
    """What a stream has sent of an output."""

    offset: int = 0
    is_started: bool = False


class _Call:
    """A request, and how its outputs are written."""

    def __init__(self, context: ServerContext, body: CompletionRequest) -> None:
        self._body = body
        self._texts = context.token_texts
        self._engine = context.engine
        self._model = body.model or context.config.model_name
        self._id = parts.reply_id("cmpl")
        self._prompts = self._read_prompts(context)
        self._num_samples = body.n or 1
        self._is_scoring = body.max_tokens == 0
        if self._is_scoring and not body.echo:
            raise InvalidRequestError("max_tokens=0 needs echo=true; else it must be >= 1")
        max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
        logprobs: dict[str, Any] = {}
        if body.logprobs is not None:
            logprobs = {"return_logprob": True, "top_logprobs_num": body.logprobs}
            if body.echo:
                logprobs["logprob_start_len"] = 0
        self.job = Job(
            input_ids=[ids for _, ids in self._prompts],
            sampling_params=[
                parts.request_params(self._engine, body, len(ids), max_tokens)
                for _, ids in self._prompts
            ],
            rids=new_rids(len(self._prompts), f"{self._id}-"),
            logprobs=logprobs,
            lora=[parts.adapter(context, body)] * len(self._prompts),
        )

    def _read_prompts(self, context: ServerContext) -> list[tuple[str | None, list[int]]]:
        """Text, if it was given, and ids of each prompt."""
        given: Any = self._body.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            given = [given]
        if not given:
            raise InvalidRequestError("prompt must hold at least one prompt, got []")
        return [
            (each, self._engine.tokenize(each, max_tokens=self._engine.max_model_len))
            if isinstance(each, str)
            else (None, each)
            for each in given
        ]

    def answer(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """The whole reply."""
        shown = [self._shown(output) for output in outputs]
        return {
            **parts.head("text_completion", self._id, self._model),
            "choices": [
                self._choice(index, output, _Progress()) for index, output in enumerate(shown)
            ],
            "usage": parts.usage(shown, self._num_samples),
        }

    async def events(self, pieces: PieceStream) -> AsyncIterator[str]:
        """The reply as a stream of chunks."""
        head = parts.head("text_completion", self._id, self._model)
        progress = [_Progress() for _ in range(self.job.num_samples)]
        last: dict[int, Output] = {}
        async for piece in pieces:
            index = piece["index"]
            last[index] = shown = self._shown(piece)
            yield event({**head, "choices": [self._choice(index, shown, progress[index])]})
        for each in parts.last_events(self._body, head, last, self._num_samples):
            yield each

    def _shown(self, output: Output) -> Output:
        """The output, without the token that is only generated since something must be."""
        if not self._is_scoring:
            return output
        meta = output["meta_info"]
        cut: dict[str, Any] = {name: [] for name in meta if name.startswith("output_")}
        cut |= {"token_weight_versions": [], "completion_tokens": 0}
        if meta["finish_reason"] is not None:
            cut["finish_reason"] = {"type": "length", "length": 0}
        return {**output, "text": "", "output_ids": [], "meta_info": {**meta, **cut}}

    def _choice(self, index: int, output: Output, progress: _Progress) -> dict[str, Any]:
        text, ids = self._prompts[index // self._num_samples]
        written = output["text"]
        choice: dict[str, Any] = {"index": index, "text": written}
        is_first, progress.is_started = not progress.is_started, True
        if self._body.echo and is_first:
            if text is None:
                text = self._engine.detokenize(ids, skip_special_tokens=None)
            choice["text"] = text + written
        choice["logprobs"] = None
        if self._body.logprobs is not None:
            choice["logprobs"] = self._logprobs(output, progress, ids, self._body.echo and is_first)
        choice |= parts.finish_fields(output)
        choice |= parts.id_fields(self._body, output)
        if self._body.return_token_ids and is_first:
            choice["prompt_token_ids"] = ids
        return choice

    def _logprobs(
        self, output: Output, progress: _Progress, prompt_ids: list[int], with_prompt: bool
    ) -> dict[str, list[Any]]:
        meta = output["meta_info"]
        entries, tops = list(meta["output_token_logprobs"]), self._tops(meta, "output")
        if with_prompt and "input_token_logprobs" in meta:
            entries = meta["input_token_logprobs"] + entries
            tops = self._tops(meta, "input") + tops
        elif with_prompt:  # aborted before its prompt was scored
            entries = [(None, token, None) for token in prompt_ids] + entries
            tops = [None] * len(prompt_ids) + tops
        offsets = []
        for _, token, _ in entries:
            offsets.append(progress.offset)
            progress.offset += len(self._texts[token])
        return {
            "tokens": [self._texts[token] for _, token, _ in entries],
            "token_logprobs": [logprob for logprob, _, _ in entries],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _tops(self, meta: Mapping[str, Any], side: str) -> list[dict[str, float] | None]:
        name = f"{side}_top_logprobs"
        if name not in meta:  # logprobs=0: those of the tokens alone
            return [None] * len(meta[f"{side}_token_logprobs"])
        return [
            each and {self._texts[token]: logprob for logprob, token, _ in each}
            for each in meta[name]
        ]
