"""SGLang's `/generate`: its body, and its reply whole and as a stream; and scoring."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Mapping
from typing import Any, ClassVar, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from sgljax_engine import Engine, ForeignField, InvalidRequestError, SamplingParams
from sgljax_engine.sampling_params import DEFAULT_MAX_NEW_TOKENS
from sgljax_engine.server.context import ServerContext, TokenTexts
from sgljax_engine.server.fields import (
    GENERATE,
    SAMPLING,
    Body,
    ListsOfTokenIds,
    SamplingFields,
    Texts,
    TokenIds,
)
from sgljax_engine.server.generation import Job, PieceStream, new_rids
from sgljax_engine.server.responses import DONE, event
from sgljax_engine.server.routes import DataRoute

_SGLANGS_NAMES = {"sampling_seed": "seed", "no_stop_trim": "include_stop_str_in_output"}


class SGLangSampling(SamplingFields):
    """SGLang's sampling parameters, and those that are the engine's own."""

    foreign: ClassVar[Mapping[str, ForeignField]] = SAMPLING

    max_new_tokens: int | None = Field(None, ge=0)
    min_new_tokens: int | None = Field(None, ge=0)
    sampling_seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="the same as `seed`")
    no_stop_trim: bool | None = Field(None, description="the same as `include_stop_str_in_output`")
    detokenize: bool | None = None
    decode_behind_prompt: bool | None = None
    reasoning_tags: list[str] | None = Field(None, min_length=2, max_length=2)
    max_thinking_tokens: int | None = Field(None, ge=0)
    json_schema: str | dict[str, Any] | None = Field(None, description="structured_outputs' json")
    regex: str | None = Field(None, description="structured_outputs' regex")
    ebnf: str | None = Field(None, description="structured_outputs' grammar")

    def given(self) -> dict[str, Any]:
        """The given fields; both names of a field may be given if they agree."""
        values = {name: getattr(self, name) for name in SGLangSampling.model_fields}
        values = {name: value for name, value in values.items() if value is not None}
        for name, own in _SGLANGS_NAMES.items():
            if name not in values:
                continue
            value = values.pop(name)
            if values.setdefault(own, value) != value:
                raise InvalidRequestError(f"{name}={value!r} contradicts {own}={values[own]!r}")
        return values


class SessionParams(Body):
    """Fields of `/generate` that routers would drop; see `GenerateReqInput.session_params`."""

    nested: ClassVar[Mapping[str, str]] = dict.fromkeys(
        SGLangSampling.model_fields, "session_params.sampling_params"
    )

    min_weight_version: int | None = Field(None, ge=0)
    sampling_params: SGLangSampling | list[SGLangSampling] | None = None


class GenerateReqInput(Body):
    foreign: ClassVar[Mapping[str, ForeignField]] = GENERATE
    empty_is_null: ClassVar[frozenset[str]] = frozenset({"model", "rid", "lora_path"})
    nested: ClassVar[Mapping[str, str]] = dict.fromkeys(
        SGLangSampling.model_fields, "sampling_params"
    )

    text: str | Texts | None = Field(None, description="one prompt or several")
    input_ids: TokenIds | ListsOfTokenIds | None = Field(
        None, description="token ids instead, of one prompt or several"
    )
    add_special_tokens: bool = Field(
        True, description="tokenize a text with BOS; false for a text that has it"
    )
    sampling_params: SGLangSampling | list[SGLangSampling] | None = Field(
        None, description="for all prompts, or one for each"
    )
    rid: str | Texts | None = Field(None, description="the client's id of each prompt")
    return_logprob: bool | list[bool] = Field(False, description="log-probs of the output's tokens")
    logprob_start_len: int | list[int] | None = Field(
        None, description="log-probs of the prompt too, from this position on; -1 for none"
    )
    top_logprobs_num: int | list[int] | None = Field(
        None, description="log-probs of so many likely tokens at each position"
    )
    token_ids_logprob: TokenIds | ListsOfTokenIds | None = Field(
        None, description="log-probs of these tokens at each position"
    )
    return_sampling_mask: bool = Field(
        False, description="ids that each output token was drawn from, see `sampling_params`"
    )
    return_text_in_logprobs: bool = Field(False, description="the text of each token there")
    return_routed_experts: bool = Field(
        False, description="needs a server with enable_return_routed_experts"
    )
    stream: bool = Field(False, description="answer with server-sent events")
    stream_output: bool | None = Field(
        None,
        description="true streams what is new in each event, false all so far; null takes true "
        "with log-probs, which must not be repeated, and else false, as SGLang does",
    )
    lora_path: str | list[str | None] | None = Field(None, description="name of a loaded adapter")
    model: str | None = Field(
        None, description="the model's name, or a loaded adapter's, as sglang-router sends it"
    )
    min_weight_version: int | None = Field(
        None,
        ge=0,
        description="status 503 with the code stale_weights if the server has older weights; with "
        "a weights_store it loads the newest then",
    )
    session_params: SessionParams | None = Field(
        None,
        description="min_weight_version and sampling_params may be given in here instead: "
        "sglang-router and vllm-router drop fields that they do not know, such as seed, but not "
        "this one",
    )

    def given(self, name: Literal["min_weight_version", "sampling_params"]) -> Any:
        """The value of a field that may be given in `session_params` instead."""
        own, inner = getattr(self, name), getattr(self.session_params, name, None)
        if own is not None and inner is not None:
            raise InvalidRequestError(f"give {name} or session_params.{name}, not both")
        return own if inner is None else inner


class ScoreReqInput(Body):
    input_ids: ListsOfTokenIds = Field(description="token ids of each sequence")
    start_lens: list[int] | None = Field(
        None, description="for each sequence the tokens at its start that need no log-prob; 1"
    )
    temperature: float = Field(1.0, gt=0, description="divides the logits")
    lora_path: str | None = Field(None, description="name of a loaded adapter")
    min_weight_version: int | None = Field(None, ge=0, description="as in `/generate`")


def generate_routes(context: ServerContext) -> APIRouter:
    router = APIRouter(route_class=DataRoute)

    @router.post("/generate")
    async def generate(body: GenerateReqInput, request: Request) -> Response:
        """Generates from text or token ids; see `Engine.generate`."""
        return await context.answer(
            request, body.model, lambda: _GenerateAnswer(context, body), stream=body.stream
        )

    @router.post("/score_tokens")
    async def score_tokens(body: ScoreReqInput) -> dict[str, Any]:
        """Log-probs of given tokens; see `Engine.score`."""
        context.generation.check_serves(body.min_weight_version)
        version = context.engine.weight_version
        with context.generation.watched():
            logprobs = await asyncio.to_thread(
                context.engine.score,
                body.input_ids,
                body.temperature,
                body.start_lens,
                body.lora_path or context.config.lora,
            )
        return {"logprobs": [each.tolist() for each in logprobs], "weight_version": version}

    return router


class _GenerateAnswer:
    def __init__(self, context: ServerContext, body: GenerateReqInput) -> None:
        engine = context.engine
        if body.return_routed_experts and not engine.returns_routed_experts:
            raise InvalidRequestError(
                "return_routed_experts=True needs a server with enable_return_routed_experts=True"
            )
        asked = body.return_logprob
        self._has_logprobs = any(asked) if isinstance(asked, list) else asked
        if body.stream and body.stream_output is False and self._has_logprobs:
            raise InvalidRequestError(
                "stream_output=false would repeat all log-probs in each event; with return_logprob "
                "a stream sends what is new"
            )
        self._body = body
        self._texts = context.token_texts
        prompts, is_single = _prompts(engine, body)
        beside = {"return_sampling_mask": True} if body.return_sampling_mask else {}
        params = _params(engine, body.given("sampling_params"), prompts, beside)
        self._is_single = is_single and params[0].n == 1
        rids = [body.rid] if isinstance(body.rid, str) else body.rid
        self.job = Job(
            input_ids=prompts,
            sampling_params=params,
            rids=new_rids(len(prompts)) if rids is None else rids,
            logprobs={
                "return_logprob": body.return_logprob,
                "logprob_start_len": body.logprob_start_len,
                "top_logprobs_num": body.top_logprobs_num,
                "token_ids_logprob": body.token_ids_logprob,
            },
            lora=_each("lora_path", _adapter(context, body), len(prompts)),
            min_weight_version=body.given("min_weight_version"),
        )

    def answer(self, outputs: list[dict[str, Any]]) -> Any:
        for output in outputs:
            self._write(output)
        return outputs[0] if self._is_single else outputs

    async def events(self, pieces: PieceStream) -> AsyncIterator[str]:
        """The reply as a stream; each event has all so far, or what is new."""
        is_cumulative = not self._body.stream_output and not self._has_logprobs
        so_far: dict[int, dict[str, Any]] = {}
        async for piece in pieces:
            self._write(piece)
            if is_cumulative:
                before = so_far.get(piece["index"])
                piece = so_far[piece["index"]] = piece if before is None else _joined(before, piece)
            yield event(piece)
        yield DONE

    def _write(self, output: dict[str, Any]) -> None:
        """Gives experts SGLang's form, base64 of int32 in C order, and log-probs their texts."""
        meta, body = output["meta_info"], self._body
        routed = meta.pop("routed_experts", None)
        if body.return_routed_experts and routed is not None:
            data = routed.astype("<i4").tobytes()
            meta["routed_experts"] = base64.b64encode(data).decode("ascii")
        if body.return_text_in_logprobs:
            for name, entries in meta.items():
                if name.endswith("_logprobs") and name != "output_token_sampling_logprobs":
                    meta[name] = [_with_text(self._texts, entry) for entry in entries]


def _prompts(engine: Engine, body: GenerateReqInput) -> tuple[list[list[int]], bool]:
    """Token ids of each prompt, and whether one was given by itself."""
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequestError("give exactly one of text and input_ids")
    if body.text is not None:
        prompts = [
            engine.tokenize(
                text, add_special_tokens=body.add_special_tokens, max_tokens=engine.max_model_len
            )
            for text in ([body.text] if isinstance(body.text, str) else body.text)
        ]
        is_single = isinstance(body.text, str)
    else:
        ids: Any = body.input_ids
        is_single = not ids or isinstance(ids[0], int)
        prompts = [ids] if is_single else ids
    if not prompts:
        raise InvalidRequestError("there must be at least one prompt, got []")
    return prompts, is_single


def _adapter(context: ServerContext, body: GenerateReqInput) -> Any:
    """The adapter of all prompts, or of each; `model` names one too."""
    named = None if body.model == context.config.model_name else body.model
    if named is not None and body.lora_path not in (None, named):
        raise InvalidRequestError(f"model={named!r} contradicts lora_path={body.lora_path!r}")
    return body.lora_path or named or context.default_adapter


def _params(
    engine: Engine, given: Any, prompts: list[list[int]], beside: dict[str, Any]
) -> list[SamplingParams]:
    """The parameters of each prompt, with fields that are given beside them."""
    if given is None:
        return [_default_params(engine, len(ids)).override(beside) for ids in prompts]
    each: list[SGLangSampling] = _each("sampling_params", given, len(prompts))
    return [SamplingParams().override(fields.given() | beside) for fields in each]


def _default_params(engine: Engine, num_prompt_tokens: int) -> SamplingParams:
    """The model's parameters, with fewer new tokens where no more fit behind a prompt."""
    params = engine.get_default_sampling_params()
    most = params.max_new_tokens
    if most is None:
        most = max(DEFAULT_MAX_NEW_TOKENS, params.min_new_tokens)
    limit = max(1, engine.max_new_tokens(num_prompt_tokens))  # the engine refuses the prompt
    return params.override({"max_new_tokens": min(most, limit)})


def _each(name: str, given: Any, count: int) -> list[Any]:
    each = given if isinstance(given, list) else [given] * count
    if len(each) != count:
        raise InvalidRequestError(
            f"{name} must be one for all or one for each of the {count} prompts, got {len(each)}"
        )
    return each


def _joined(before: Mapping[str, Any], piece: Mapping[str, Any]) -> dict[str, Any]:
    """An output up to and with a piece."""
    meta, new = before["meta_info"], piece["meta_info"]
    joined = dict(new)
    for name, value in meta.items():
        if name.startswith("output_") or name == "token_weight_versions":
            joined[name] = value + new[name]
        elif name.startswith("input_"):  # in the first piece only, or in all
            joined[name] = value
    versions = joined["token_weight_versions"]
    joined["first_weight_version"] = versions[0] if versions else None
    return {
        **piece,
        "text": before["text"] + piece["text"],
        "output_ids": before["output_ids"] + piece["output_ids"],
        "meta_info": joined,
    }


def _with_text(texts: TokenTexts, entry: Any) -> Any:
    if entry is None:
        return None
    if isinstance(entry, list):  # of the most likely tokens at a position
        return [_with_text(texts, each) for each in entry]
    logprob, token, _ = entry
    return (logprob, token, texts[token])
