"""SGLang's `/generate`."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from sgljax_engine import Engine, InvalidRequestError, SamplingParams
from sgljax_engine.server.context import ServerContext, TokenTexts
from sgljax_engine.server.fields import default_params, sampling_params
from sgljax_engine.server.generation import Job, PieceStream, new_rids
from sgljax_engine.server.openai.models import check_model
from sgljax_engine.server.prepared import prepared, written
from sgljax_engine.server.replies import DONE, EventStream, event, reply
from sgljax_engine.server.routes import DataRoute
from sgljax_engine.server.sglang.schemas import GenerateReqInput, SGLangSampling


def generate_routes(context: ServerContext) -> APIRouter:
    """The route that generates."""
    router = APIRouter(route_class=DataRoute)
    engine, generation = context.engine, context.generation

    @router.post("/generate")
    async def generate(body: GenerateReqInput, request: Request) -> Response:
        """Generates from text or token ids; see `Engine.generate`."""
        await check_model(context, body.model)
        job, is_single = await prepared(request, context, lambda: _job(context, body))
        texts = context.token_texts if body.return_text_in_logprobs else None
        if body.stream:
            pieces = await generation.stream(request, job)
            events = _events(pieces, texts, body)
            return EventStream(events, pieces, engine.weight_version)
        outputs = await generation.run(request, job)
        return await written(
            context, outputs, lambda: _answer(engine, body, texts, outputs, is_single)
        )

    return router


def _answer(
    engine: Engine,
    body: GenerateReqInput,
    texts: TokenTexts | None,
    outputs: list[dict[str, Any]],
    is_single: bool,
) -> Response:
    for output in outputs:
        _encode_routed(output, is_asked=body.return_routed_experts)
        if texts is not None:
            _add_texts(texts, output)
    version = outputs[-1]["meta_info"]["weight_version"]
    answer = outputs[0] if is_single else outputs
    return reply(answer, engine.weight_version if version is None else version)


def _job(context: ServerContext, body: GenerateReqInput) -> tuple[Job, bool]:
    """The engine's arguments, and whether the answer is one object."""
    engine = context.engine
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequestError("give exactly one of text and input_ids")
    if body.return_routed_experts and not engine.returns_routed_experts:
        raise InvalidRequestError(
            "return_routed_experts=True needs a server with enable_return_routed_experts=True"
        )
    if body.stream and body.stream_output is False and _has_logprobs(body):
        raise InvalidRequestError(
            "stream_output=false would repeat all log-probs in each event; with return_logprob a "
            "stream sends what is new"
        )
    prompts: list[list[int]]
    if body.text is not None:
        is_single = isinstance(body.text, str)
        texts = [body.text] if isinstance(body.text, str) else body.text
        prompts = [
            engine.tokenize(
                text,
                add_special_tokens=body.add_special_tokens,
                max_tokens=engine.max_model_len,
            )
            for text in texts
        ]
    else:
        ids: Any = body.input_ids
        is_single = not ids or isinstance(ids[0], int)
        prompts = [ids] if is_single else ids
    if not prompts:
        raise InvalidRequestError("there must be at least one prompt, got []")
    params = _params(engine, body.sampling_params, prompts)
    rids = [body.rid] if isinstance(body.rid, str) else body.rid
    job = Job(
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
    )
    return job, is_single and params[0].n == 1


def _adapter(context: ServerContext, body: GenerateReqInput) -> Any:
    """The adapter of all prompts, or of each; `model` names one too."""
    named = None if body.model == context.config.model_name else body.model
    if named is not None and body.lora_path not in (None, named):
        raise InvalidRequestError(f"model={named!r} contradicts lora_path={body.lora_path!r}")
    return body.lora_path or named or context.config.lora


def _has_logprobs(body: GenerateReqInput) -> bool:
    given = body.return_logprob
    return any(given) if isinstance(given, list) else given


def _params(engine: Engine, given: Any, prompts: list[list[int]]) -> list[SamplingParams]:
    if given is None:
        return [default_params(engine, len(ids)) for ids in prompts]
    each: list[SGLangSampling] = _each("sampling_params", given, len(prompts))
    try:
        return [sampling_params(None, fields.given()) for fields in each]
    except InvalidRequestError:
        raise
    except ValueError as error:  # two names of a field that contradict one another
        raise InvalidRequestError(str(error)) from error


def _each(name: str, given: Any, count: int) -> list[Any]:
    each = given if isinstance(given, list) else [given] * count
    if len(each) != count:
        raise InvalidRequestError(
            f"{name} must be one for all or one for each of the {count} prompts, got {len(each)}"
        )
    return each


async def _events(
    pieces: PieceStream, texts: TokenTexts | None, body: GenerateReqInput
) -> AsyncIterator[str]:
    is_cumulative = not body.stream_output and not _has_logprobs(body)
    so_far: dict[int, dict[str, Any]] = {}
    async for piece in pieces:
        _encode_routed(piece, is_asked=body.return_routed_experts)
        if texts is not None:
            _add_texts(texts, piece)
        if is_cumulative:
            before = so_far.get(piece["index"])
            piece = so_far[piece["index"]] = piece if before is None else _joined(before, piece)
        yield event(piece)
    yield DONE


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


def _encode_routed(output: dict[str, Any], *, is_asked: bool) -> None:
    """Gives the experts SGLang's form, the base64 of int32 in C order, or takes them away."""
    routed = output["meta_info"].pop("routed_experts", None)
    if is_asked and routed is not None:
        encoded = base64.b64encode(routed.astype("<i4").tobytes()).decode("ascii")
        output["meta_info"]["routed_experts"] = encoded


def _add_texts(texts: TokenTexts, output: dict[str, Any]) -> None:
    """Puts the text of each token into an output's log-probs, where SGLang has it."""
    meta = output["meta_info"]
    for name, entries in meta.items():
        if name.endswith("_logprobs"):
            meta[name] = [_with_text(texts, entry) for entry in entries]


def _with_text(texts: TokenTexts, entry: Any) -> Any:
    if entry is None:
        return None
    if isinstance(entry, list):  # of the most likely tokens at a position
        return [_with_text(texts, each) for each in entry]
    logprob, token, _ = entry
    return (logprob, token, texts[token])
