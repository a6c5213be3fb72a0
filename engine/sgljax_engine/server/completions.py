"""OpenAI's `/v1/completions`."""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from sgljax_engine import MAX_TOP_LOGPROBS, ForeignField, InvalidRequestError
from sgljax_engine.server import openai
from sgljax_engine.server.context import ServerContext
from sgljax_engine.server.fields import COMPLETION, ListsOfTokenIds, Texts, TokenIds
from sgljax_engine.server.generation import Job, PieceStream, new_rids
from sgljax_engine.server.openai import OpenAIRequest, Output, token_id_name
from sgljax_engine.server.responses import event
from sgljax_engine.server.routes import OpenAIRoute

_REPLACEMENT = "\ufffd"
_MAX_BROKEN = 3
"""Bytes of a character that lacks some; decoders write one U+FFFD for all or for each."""

_DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


class CompletionRequest(OpenAIRequest):
    foreign: ClassVar[Mapping[str, ForeignField]] = COMPLETION

    prompt: str | TokenIds | Texts | ListsOfTokenIds = Field(
        description="text or token ids, one prompt or a list of them"
    )
    add_special_tokens: bool = Field(
        True, description="tokenize a text with BOS; false for a text that has it"
    )
    echo: bool = Field(False, description="put the prompt before the text, and into the log-probs")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="log-probs, and of so many likely tokens"
    )


def completion_routes(context: ServerContext) -> APIRouter:
    router = APIRouter(route_class=OpenAIRoute)

    @router.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continues prompts, given as text or as token ids."""
        return await context.answer(
            request, body.model, lambda: _CompletionAnswer(context, body), stream=body.stream
        )

    return router


@dataclasses.dataclass
class _Progress:
    """The part of an output that a stream has sent; `offset` counts characters for log-probs.

    `utf8` has the bytes of a character that is not whole yet. `broken` is the end of an echoed
    prompt of ids that is a part of a character, until it is known whether the output, `output_ids`,
    completes it.
    """

    offset: int = 0
    utf8: codecs.IncrementalDecoder = dataclasses.field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )
    is_started: bool = False
    broken: str = ""
    output_ids: list[int] = dataclasses.field(default_factory=list)


class _CompletionAnswer:
    def __init__(self, context: ServerContext, body: CompletionRequest) -> None:
        self._body = body
        self._texts = context.token_texts
        self._engine = context.engine
        self._model = body.model or context.config.model_name
        self._id = openai.reply_id("cmpl")
        self._prompts = self._read_prompts(context)
        self._num_samples = body.n or 1
        if body.max_tokens == 0 and not body.echo:
            raise InvalidRequestError("max_tokens=0 needs echo=true; else it must be >= 1")
        _, outputs = openai.outputs_of(body)
        logprobs: dict[str, Any] = {}
        if body.logprobs is not None:
            logprobs = {"return_logprob": True, "top_logprobs_num": body.logprobs}
            if body.echo:
                logprobs["logprob_start_len"] = 0
        self.job = Job(
            input_ids=[ids for _, ids in self._prompts],
            sampling_params=[
                openai.request_params(
                    self._engine,
                    body,
                    len(ids),
                    body.max_tokens,
                    default_tokens=_DEFAULT_MAX_TOKENS,
                    text_options={"structured_outputs": outputs},
                )
                for _, ids in self._prompts
            ],
            rids=new_rids(len(self._prompts), f"{self._id}-"),
            logprobs=logprobs,
            lora=[openai.adapter(context, body)] * len(self._prompts),
        )

    def _read_prompts(self, context: ServerContext) -> list[tuple[str | None, list[int]]]:
        """Text, if it was given, and ids of each prompt."""
        given: Any = self._body.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            given = [given]
        if not given:
            raise InvalidRequestError("prompt must hold at least one prompt, got []")
        return [
            (each, self._tokenize(each)) if isinstance(each, str) else (None, each)
            for each in given
        ]

    def _tokenize(self, text: str) -> list[int]:
        return self._engine.tokenize(
            text,
            add_special_tokens=self._body.add_special_tokens,
            max_tokens=self._engine.max_model_len,
        )

    def answer(self, outputs: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            **openai.head("text_completion", self._id, self._model),
            "choices": [
                self._choice(index, output, _Progress()) for index, output in enumerate(outputs)
            ],
            "usage": openai.usage(outputs, self._num_samples),
        }

    async def events(self, pieces: PieceStream) -> AsyncIterator[str]:
        head = openai.head("text_completion", self._id, self._model)
        progress = [_Progress() for _ in range(self.job.num_samples)]
        last: dict[int, Output] = {}
        async for piece in pieces:
            index = piece["index"]
            last[index] = piece
            yield event({**head, "choices": [self._choice(index, piece, progress[index])]})
        for each in openai.last_events(self._body, head, last, self._num_samples):
            yield each

    def _choice(self, index: int, output: Output, progress: _Progress) -> dict[str, Any]:
        text, ids = self._prompts[index // self._num_samples]
        choice: dict[str, Any] = {"index": index, "text": output["text"]}
        is_first, progress.is_started = not progress.is_started, True
        if self._body.echo:
            choice["text"] = self._echo(text, ids, output, progress, is_first=is_first)
        choice["logprobs"] = None
        if self._body.logprobs is not None:
            echoed = choice["text"] if self._body.echo and is_first else None
            choice["logprobs"] = self._logprobs(output, progress, ids, echoed)
        choice |= openai.finish_fields(output)
        choice |= openai.id_fields(self._body, output)
        if self._body.return_token_ids and is_first:
            choice["prompt_token_ids"] = ids
        return choice

    def _echo(
        self,
        text: str | None,
        ids: list[int],
        output: Output,
        progress: _Progress,
        *,
        is_first: bool,
    ) -> str:
        """New text of an output, with its prompt before the first."""
        echoed = ""
        if is_first and text is not None:
            echoed = text
        elif is_first:
            whole = self._engine.detokenize(ids, skip_special_tokens=None)
            num_held = len(whole) - len(whole.rstrip(_REPLACEMENT))
            echoed = whole[: len(whole) - min(num_held, _MAX_BROKEN)]
            progress.broken = whole[len(echoed) :]
        if progress.broken:
            progress.output_ids += output["output_ids"]
            if output["text"] or output["meta_info"]["finish_reason"] is not None:
                echoed += self._unless_completed(ids, progress)
        return echoed + output["text"]

    def _unless_completed(self, ids: list[int], progress: _Progress) -> str:
        """The broken end of a prompt, unless the output completes its character."""
        broken, progress.broken = progress.broken, ""
        before = self._engine.detokenize(ids, skip_special_tokens=None)
        whole = self._engine.detokenize([*ids, *progress.output_ids], skip_special_tokens=None)
        return broken if whole.startswith(before) else ""

    def _logprobs(
        self, output: Output, progress: _Progress, prompt_ids: list[int], echoed: str | None
    ) -> dict[str, list[Any]]:
        """Log-probs of new tokens, behind those of the prompt where its text is echoed."""
        meta, with_prompt = output["meta_info"], echoed is not None
        entries, tops = list(meta["output_token_logprobs"]), self._tops(meta, "output")
        if with_prompt and "input_token_logprobs" in meta:
            entries = meta["input_token_logprobs"] + entries
            tops = self._tops(meta, "input") + tops
        elif with_prompt:  # aborted before its prompt was scored
            entries = [(None, token, None) for token in prompt_ids] + entries
            tops = [None] * len(prompt_ids) + tops
        num_echoed = len(prompt_ids) if with_prompt else 0
        offsets = []
        for index, (_, token, _) in enumerate(entries):
            offsets.append(progress.offset)
            self._pass(token, progress, echoed if index < num_echoed else None)
        return {
            "tokens": [self._name(token) for _, token, _ in entries],
            "token_logprobs": [logprob for logprob, _, _ in entries],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _pass(self, token: int, progress: _Progress, echoed: str | None) -> None:
        """Counts the characters that a token completes in the text."""
        name = self._texts[token]
        if name in self._texts.special:
            is_shown = self._body.skip_special_tokens is False
            if echoed is not None:
                is_shown = echoed.startswith(name, progress.offset)
            progress.offset += len(name) if is_shown else 0
            return
        known = self._texts.bytes_of(token)
        text = progress.utf8.decode(name.encode() if known is None else known)
        if echoed is not None and progress.offset == 0 and not echoed.startswith(text):
            text = text.removeprefix(" ")  # a tokenizer put it there
        progress.offset += len(text)

    def _tops(self, meta: Mapping[str, Any], side: str) -> list[dict[str, float] | None]:
        name = f"{side}_top_logprobs"
        if name not in meta:  # logprobs=0: those of the tokens alone
            return [None] * len(meta[f"{side}_token_logprobs"])
        return [each and self._named(each) for each in meta[name]]

    def _named(self, entries: Sequence[Any]) -> dict[str, float]:
        """Log-probs by the tokens' names; of equal texts, the likeliest token has it."""
        named: dict[str, float] = {}
        for logprob, token, _ in entries:  # by descending log-prob
            name = self._name(token)
            named[name if name not in named else token_id_name(token)] = logprob
        return named

    def _name(self, token: int) -> str:
        return openai.token_name(self._body, self._texts, token)
