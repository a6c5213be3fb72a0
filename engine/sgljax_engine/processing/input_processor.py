"""Turns callers' arguments into checked requests. Any thread."""

from __future__ import annotations

import dataclasses
import math
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any, NamedTuple

import numpy as np

from sgljax_engine.checkpoint.request import RequestCheckpoint
from sgljax_engine.checks import is_int
from sgljax_engine.errors import InvalidRequestError
from sgljax_engine.io_struct import check_flags
from sgljax_engine.model_config import ModelConfig
from sgljax_engine.processing.bounded_text import check_length
from sgljax_engine.processing.guides import Guides
from sgljax_engine.processing.special_stops import SpecialStops
from sgljax_engine.processing.tokenizer import Tokenizer, decode_options
from sgljax_engine.sampling_params import (
    DEFAULT_MAX_NEW_TOKENS,
    MAX_STOP_TOKEN_IDS,
    LogprobOptions,
    SamplingParams,
    SeedSource,
    derive_seed,
)
from sgljax_engine.structured_outputs import has_grammar
from sgljax_engine.types import LogitEdits, Request, RequestStatus, prompt_key

_MANY_ITEMS = 10_000
"""Characters and token ids that become requests within about a millisecond."""


class Limits(NamedTuple):
    """Limits of one request; `max_kv_tokens` is what the whole KV pool holds."""

    max_model_len: int
    max_kv_tokens: int


class LogprobArgs(NamedTuple):
    """The log-prob arguments of a `generate` call: each a value for all prompts, or a list."""

    return_logprob: Any = False
    logprob_start_len: Any = None
    top_logprobs_num: Any = None
    token_ids_logprob: Any = None

    def of_each(self, count: int) -> list[LogprobOptions]:
        lists = [
            _one_for_each(name, value, count)
            for name, value in zip(self._fields[:3], self[:3], strict=True)
        ]
        ids = self.token_ids_logprob
        is_nested = isinstance(ids, (list, tuple)) and any(
            each is None or isinstance(each, (list, tuple)) for each in ids
        )
        if is_nested and len(ids) != count:
            raise _count_error("token_ids_logprob", len(ids), count)
        lists.append(list(ids) if is_nested else [ids] * count)
        return [
            LogprobOptions(
                enabled=enabled,
                start_len=-1 if start is None else start,
                top_num=0 if top is None else top,
                token_ids=() if token_ids is None else token_ids,
            )
            for enabled, start, top, token_ids in zip(*lists, strict=True)
        ]


class RequestFactory:
    """Tokenizes and checks requests. Raises InvalidRequestError with the field and its limit.

    The tokenizer's end-of-sequence id joins the model's. `seeds` are for requests without one. Of
    what a grammar forces, at most `max_drafts` tokens are drafted.
    """

    def __init__(
        self,
        model: ModelConfig,
        limits: Limits,
        tokenizer: Tokenizer | None,
        seeds: SeedSource,
        max_drafts: int = 0,
    ) -> None:
        self.limits = limits
        self.seeds = seeds
        self._model = model
        self._tokenizer = tokenizer
        self._special_stops = SpecialStops(tokenizer)
        own = tokenizer.eos_token_id if tokenizer is not None else None
        self._eos_ids = (*model.eos_token_ids, *(() if own is None else (own,)))
        self._guides = Guides(tokenizer, model.vocab_size, self._eos_ids, max_drafts)

    def make(
        self,
        prompt: Any,
        sampling_params: Any,
        input_ids: Any,
        logprobs: LogprobArgs,
        rid: Any = None,
        lora: Any = None,
        *,
        is_streaming: bool,
        is_default: bool = False,
        stands_alone: bool = False,
    ) -> tuple[list[Request], bool]:
        """The requests of a `generate` call, and whether its answer is a single dict.

        With `is_default` the caller gave no parameters, so those that do not fit are cut. With
        `stands_alone` outputs are decoded without the prompt before them.
        """
        check_flags(stream=is_streaming)
        prompts, is_single = self._prompt_ids(prompt, input_ids)
        groups = _groups(rid, len(prompts))
        params = _params_of_each(sampling_params, len(prompts))
        options = logprobs.of_each(len(prompts))
        loras = _loras(lora, len(prompts))
        now = time.perf_counter()
        requests: list[Request] = []
        for ids, settings, reported, group, adapter in zip(
            prompts, params, options, groups, loras, strict=True
        ):
            settings = self._with_limit(ids, settings, is_default=is_default)
            if stands_alone and settings.decode_behind_prompt:
                settings = dataclasses.replace(settings, decode_behind_prompt=False)
            stop_ids = self._check_request(ids, settings)
            self._check_logprobs(ids, reported)
            edits = self._logit_edits(settings, stop_ids)
            guide = None
            if settings.is_guided:
                guide = self._guides.make(settings, stop_ids, edits)
            key = prompt_key(ids, adapter)
            seed = self.seeds.fresh() if settings.seed in (None, -1) else settings.seed
            requests.extend(
                Request(
                    rid=group if settings.n == 1 else f"{group}-{sample}",
                    group=group,
                    prompt_ids=ids,
                    params=settings,
                    seed=derive_seed(seed, sample),
                    stop_ids=stop_ids,
                    edits=edits,
                    guide=guide.copy() if guide is not None and sample else guide,
                    logprob_options=reported,
                    is_streaming=is_streaming,
                    lora=adapter,
                    prompt_key=key,
                    arrival_s=now,
                )
                for sample in range(settings.n)
            )
        return requests, is_single and params[0].n == 1

    def resume(self, saved: RequestCheckpoint, now_s: float) -> Request:
        """Rebuilds a request of a checkpoint, as this engine would have made it, or refuses it."""
        ids = self.check_ids(saved.prompt_ids)
        if saved.output_ids:
            self.check_ids(saved.output_ids)
        if saved.status is RequestStatus.FINISHED:  # it needs no more checks
            return saved.to_request((), None, now_s)
        stop_ids = self._check_request(ids, saved.params)
        self._check_logprobs(ids, saved.logprob_options)
        edits = self._logit_edits(saved.params, stop_ids)
        request = saved.to_request(stop_ids, edits, now_s)
        if saved.params.is_guided:
            request.guide = self._guides.make(saved.params, stop_ids, edits, saved.output_ids)
        if request.num_remaining < 1:
            raise InvalidRequestError(
                f"request {saved.rid!r} has {len(saved.output_ids)} of "
                f"{saved.params.max_new_tokens} new tokens and is not finished"
            )
        request.is_streaming = False  # the stream's reader is gone
        return request

    def check_scored(
        self, sequences: Any, temperature: Any, start_lens: Any
    ) -> tuple[list[list[int]], list[int]]:
        if SamplingParams(temperature=temperature).temperature == 0.0:
            raise InvalidRequestError(f"temperature must be > 0 to score, got {temperature!r}")
        if isinstance(sequences, (str, bytes, Mapping)) or not hasattr(sequences, "__iter__"):
            raise InvalidRequestError(f"sequences must be a list of lists, got {sequences!r}")
        sequences = list(sequences)  # a generator's items come once
        if any(_is_number(ids) for ids in sequences):
            raise InvalidRequestError(
                f"sequences must be a list of lists of integers, got {sequences!r}"
            )
        checked = [self.check_ids(ids) for ids in sequences]
        longest = max((len(ids) for ids in checked), default=0)
        if longest > self.limits.max_model_len:
            raise InvalidRequestError(
                f"a sequence to score has {longest} tokens, the limit is max_model_len = "
                f"{self.limits.max_model_len}"
            )
        if start_lens is None:
            return checked, [1] * len(checked)
        starts = list(start_lens)
        if len(starts) != len(checked):
            raise InvalidRequestError(
                f"start_lens must have one entry for each of the {len(checked)} sequences, got "
                f"{len(starts)}"
            )
        for start, ids in zip(starts, checked, strict=True):
            if not is_int(start) or not 1 <= start <= len(ids):
                raise InvalidRequestError(
                    f"start_lens must be integers from 1 to the length of their sequence "
                    f"({len(ids)}), got {start!r}"
                )
        return checked, [int(start) for start in starts]

    # ------------------------------------------------------------------ prompts

    def _prompt_ids(self, prompt: Any, input_ids: Any) -> tuple[list[list[int]], bool]:
        if (prompt is None) == (input_ids is None):
            raise InvalidRequestError("give exactly one of prompt and input_ids")
        if isinstance(prompt, str):
            return [self._encode(prompt)], True
        given = input_ids if prompt is None else prompt
        if (
            isinstance(given, (str, bytes, Mapping))
            or not hasattr(given, "__len__")
            or not hasattr(given, "__iter__")
        ):
            name = "input_ids" if prompt is None else "prompt"
            hint = _prompt_hint(given) if prompt is not None else _ids_hint(given)
            raise InvalidRequestError(f"{name} must be a list, got {type(given).__name__}{hint}")
        if prompt is not None:
            return [self._encode(text) for text in prompt], False
        is_single = len(input_ids) == 0 or _is_number(input_ids[0])
        each = [input_ids] if is_single else input_ids
        return [self.check_ids(ids) for ids in each], is_single

    def _encode(self, text: Any) -> list[int]:
        if not isinstance(text, str):
            raise InvalidRequestError(
                f"prompt must be text, got {type(text).__name__}{_prompt_hint(text)}"
            )
        if self._tokenizer is None:
            raise InvalidRequestError(
                "prompt needs a tokenizer and the engine has none; use input_ids"
            )
        check_length(self._tokenizer, text, self.limits.max_model_len)
        return self.check_ids(self._tokenizer.encode(text))

    def check_ids(self, ids: Any) -> list[int]:
        """Checked token ids of the vocabulary, at least one; else raises InvalidRequestError."""
        try:
            array = np.asarray(ids)
        except ValueError:
            raise InvalidRequestError(
                f"input_ids must be a list of integers, got {ids!r}"
            ) from None
        if array.ndim == 1 and array.size == 0:
            raise InvalidRequestError("the prompt is empty; it needs at least one token")
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
            raise InvalidRequestError(
                f"input_ids must be a list of integers, got shape {array.shape} of {array.dtype}"
                f"{_ids_hint(array.flat[0]) if array.size else ''}"
            )
        bad = (array < 0) | (array >= self._model.vocab_size)
        if bad.any():
            raise InvalidRequestError(
                f"input_ids must be in [0, {self._model.vocab_size}), got {array[bad][0]} at "
                f"position {int(bad.argmax())}"
            )
        return array.tolist()

    # ------------------------------------------------------------------ limits

    def _with_limit(
        self, ids: list[int], params: SamplingParams, *, is_default: bool
    ) -> SamplingParams:
        """The parameters with a maximum of new tokens; a default is cut to what fits."""
        if params.max_new_tokens is not None and not is_default:
            return params
        wanted = params.max_new_tokens
        if wanted is None:
            wanted = max(DEFAULT_MAX_NEW_TOKENS, params.min_new_tokens)
        room = min(self.limits.max_model_len, self.limits.max_kv_tokens + 1) - len(ids)
        most = max(1, min(wanted, room))  # without any room the checks that follow say so
        least = min(params.min_new_tokens, most) if is_default else params.min_new_tokens
        return dataclasses.replace(params, max_new_tokens=most, min_new_tokens=least)

    def _check_request(self, ids: list[int], params: SamplingParams) -> tuple[int, ...]:
        """Checks lengths and stop ids against the engine's limits; returns the stop ids."""
        limits = self.limits
        total = len(ids) + max(1, params.max_new_tokens or 0)  # to prefill alone takes one too
        num_new = params.max_new_tokens
        if len(ids) == limits.max_model_len and num_new == 0:
            pass  # what it generates unseen is written nowhere
        elif len(ids) >= limits.max_model_len:
            less, most = ("", 0) if num_new == 0 else (" - 1", 1)
            raise InvalidRequestError(
                f"the prompt has {len(ids)} tokens, the limit is max_model_len{less} = "
                f"{limits.max_model_len - most}"
            )
        elif total > limits.max_model_len:
            raise InvalidRequestError(
                f"prompt ({len(ids)}) plus max_new_tokens ({params.max_new_tokens}) is {total} "
                f"tokens, the limit is max_model_len = {limits.max_model_len}"
            )
        if total - 1 > limits.max_kv_tokens:
            raise InvalidRequestError(
                f"prompt ({len(ids)}) plus max_new_tokens ({params.max_new_tokens}) needs "
                f"{total - 1} KV tokens, the pool holds {limits.max_kv_tokens}"
            )
        self._check_vocabulary("stop_token_ids", params.stop_token_ids)
        if params.detokenize and self._tokenizer is not None:
            self._tokenizer.check_decode_options(decode_options(params))
        if params.stop and self._tokenizer is None:
            raise InvalidRequestError(
                f"stop={list(params.stop)!r} needs a tokenizer and the engine has none"
            )
        eos_ids = () if params.ignore_eos else self._eos_ids
        special: Sequence[int] = ()
        if params.stop and params.skip_special_tokens:
            special = self._special_stops.ids(params.stop)
        stop_ids = tuple(dict.fromkeys((*params.stop_token_ids, *special, *eos_ids)))
        if len(stop_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                f"stop_token_ids (end-of-sequence ids included) must be at most "
                f"{MAX_STOP_TOKEN_IDS}, got {len(stop_ids)}"
            )
        return stop_ids

    def _check_logprobs(self, ids: list[int], options: LogprobOptions) -> None:
        self._check_vocabulary("token_ids_logprob", options.token_ids)
        if options.start_len >= len(ids):
            raise InvalidRequestError(
                f"logprob_start_len must be below the prompt's {len(ids)} tokens, "
                f"got {options.start_len}"
            )
        if options.top_num > self._model.vocab_size:
            raise InvalidRequestError(
                f"top_logprobs_num must be at most the vocabulary's {self._model.vocab_size} "
                f"tokens, got {options.top_num}"
            )

    def _check_vocabulary(self, name: str, ids: Iterable[int]) -> None:
        for token_id in ids:
            if token_id >= self._model.vocab_size:
                raise InvalidRequestError(
                    f"{name} must be in [0, {self._model.vocab_size}), got {token_id}"
                )

    def _logit_edits(self, params: SamplingParams, stop_ids: tuple[int, ...]) -> LogitEdits | None:
        """The request's changes to logits; refuses settings that could forbid every token."""
        bias, allowed = params.logit_bias or {}, params.allowed_token_ids
        for name, ids in (
            ("logit_bias", bias),
            ("allowed_token_ids", allowed or ()),
            ("bad_token_ids", params.bad_token_ids),
        ):
            self._check_vocabulary(name, ids)
        values: dict[int, float] = dict.fromkeys(allowed or (), 0.0)
        for token_id, value in bias.items():
            if allowed is None or token_id in values:
                values[token_id] = value
        values |= dict.fromkeys(params.bad_token_ids, -math.inf)
        forbidden = {token_id for token_id, value in values.items() if value == -math.inf}
        if params.min_new_tokens > 0:
            forbidden |= set(stop_ids)
        num_left = self._model.vocab_size - len(forbidden)
        if allowed is not None:
            num_left = len(set(allowed) - forbidden)
        if num_left == 0:
            raise InvalidRequestError(
                "allowed_token_ids, bad_token_ids and min_new_tokens must leave a token that is "
                f"not a stop token, got {params.allowed_token_ids=}, {params.bad_token_ids=}, "
                f"{params.min_new_tokens=}"
            )
        if not values:
            return None
        return LogitEdits(
            np.fromiter(values.keys(), np.int32, len(values)),
            np.fromiter(values.values(), np.float32, len(values)),
            allowed is not None,
        )


def takes_long(prompts: Any, sampling_params: Any) -> bool:
    """Whether it takes long to make requests; what is no prompt is refused at once."""
    several = isinstance(sampling_params, (list, tuple))
    if any(has_grammar(each) for each in (sampling_params if several else [sampling_params])):
        return True  # which is compiled
    if not isinstance(prompts, (str, list, tuple)):
        return False
    if isinstance(prompts, str) or len(prompts) > _MANY_ITEMS:
        return len(prompts) > _MANY_ITEMS
    return sum(len(each) if isinstance(each, Sized) else 1 for each in prompts) > _MANY_ITEMS


def _loras(lora: Any, count: int) -> list[str | None]:
    names = _one_for_each("lora", lora, count)
    for name in names:
        if name is not None and (not isinstance(name, str) or not name):
            raise InvalidRequestError(f"lora must be None or an adapter's name, got {name!r}")
    return list(names)


def _groups(rid: Any, count: int) -> list[str]:
    if rid is None:
        return [uuid.uuid4().hex for _ in range(count)]
    groups = [rid] if isinstance(rid, str) else rid
    if not isinstance(groups, (list, tuple)) or not all(isinstance(g, str) and g for g in groups):
        raise InvalidRequestError(f"rid must be a string, or a list of them, got {rid!r}")
    if len(groups) != count:
        raise InvalidRequestError(
            f"rid must have one id for each of the {count} prompts, got {len(groups)}"
        )
    if len(set(groups)) < count:
        raise InvalidRequestError(f"rid must have different ids for the prompts, got {rid!r}")
    return list(groups)


def _prompt_hint(given: Any) -> str:
    """A hint for a prompt that is not text, as other engines accept it."""
    if isinstance(given, Mapping):
        if "role" in given:
            return "; messages go into Engine.chat"
        return "; give its text as prompt, or its token ids as input_ids"
    return "" if isinstance(given, bytes) else "; give token ids as input_ids"


def _ids_hint(given: Any) -> str:
    if isinstance(given, str):
        return "; give text as prompt"
    return "; give its ['input_ids']" if isinstance(given, Mapping) else ""


def _is_number(value: Any) -> bool:
    try:
        return np.ndim(value) == 0
    except ValueError:  # a ragged list
        return False


def _params_of_each(given: Any, count: int) -> list[SamplingParams]:
    each = _one_for_each("sampling_params", given, count)
    return [p if isinstance(p, SamplingParams) else SamplingParams.from_dict(p) for p in each]


def _one_for_each(name: str, given: Any, count: int) -> list[Any]:
    each: Sequence[Any] = given if isinstance(given, (list, tuple)) else [given] * count
    if len(each) != count:
        raise _count_error(name, len(each), count)
    return list(each)


def _count_error(name: str, got: int, count: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"{name} must be one for all or one for each of the {count} prompts, got {got}"
    )
