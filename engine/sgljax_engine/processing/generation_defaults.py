"""Sampling parameters of a model folder's generation_config.json.

Fields mean what they mean in transformers; what is not in the file is vLLM's default. Every field
is honoured, or asks for nothing, or is named in one warning when the file is read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sgljax_engine.errors import InvalidRequestError
from sgljax_engine.model_config import ModelConfig
from sgljax_engine.sampling_params import MAX_LOGIT_BIAS, SamplingParams
from sgljax_engine.weights.hf_json import read_generation_config

logger = logging.getLogger(__name__)

_SMALLEST_TOP_P = 1e-9
"""Keeps the most likely token alone, as top_p 0 does in transformers."""

_PLAIN = (
    *("temperature", "top_k", "min_p", "repetition_penalty", "max_new_tokens", "min_new_tokens"),
)
"""Fields that have the same name and meaning here."""

_READ_ELSEWHERE = frozenset({"eos_token_id", "do_sample"})

_WITHOUT_EFFECT = frozenset(
    (
        *("_from_model_config", "_commit_hash", "transformers_version", "pad_token_id"),
        *("bos_token_id", "decoder_start_token_id", "use_cache", "cache_implementation"),
        *("cache_config", "max_cache_len", "return_dict_in_generate", "output_attentions"),
        *("output_hidden_states", "output_scores", "output_logits", "renormalize_logits"),
        *("compile_config", "disable_compile", "continuous_batching_config", "low_memory"),
        *("prefill_chunk_size", "is_assistant", "num_assistant_tokens"),
        *("num_assistant_tokens_schedule", "assistant_confidence_threshold"),
        *("assistant_early_exit", "assistant_ensemble_weight", "assistant_lookbehind"),
        *("target_lookbehind", "prompt_lookup_num_tokens", "max_matching_ngram_size"),
        *("speculation_type", "use_mtp"),
    )
)
"""Fields that change how tokens are computed, kept or returned, not which they are."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "min_length": (0,),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "diversity_penalty": (0,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "guidance_scale": (1,),
    "penalty_alpha": (0,),
    "early_stopping": (False,),
    "remove_invalid_values": (False,),
    "token_healing": (False,),
    "begin_suppress_tokens": ([],),
}
"""Values of fields without a counterpart here that change nothing."""

_OF_BEAMS = frozenset({"length_penalty", "early_stopping", "diversity_penalty", "num_beam_groups"})
"""Fields that have an effect only with several beams, which are named themselves."""


def read_generation_defaults(
    folder: str | Path, model: ModelConfig, *, has_tokenizer: bool
) -> SamplingParams:
    """The parameters of requests that bring none; one warning names all fields without effect."""
    file = _File(read_generation_config(folder), model, has_tokenizer=has_tokenizer)
    params = file.params()
    if file.unused:
        logger.warning(
            "%s: without effect here: %s",
            Path(folder) / "generation_config.json",
            "; ".join(file.unused),
        )
    return params


class _File:
    """The file's fields, one by one; `unused` says which have no effect and why."""

    def __init__(
        self, contents: Mapping[str, Any], model: ModelConfig, *, has_tokenizer: bool
    ) -> None:
        self._contents = {name: value for name, value in contents.items() if value is not None}
        self._model = model
        self._has_tokenizer = has_tokenizer
        self.unused: list[str] = []

    def params(self) -> SamplingParams:
        fields: dict[str, Any] = {}
        for name, value in self._contents.items():
            for field, asked in self._read(name, value):
                try:
                    SamplingParams(**{field: asked})
                except InvalidRequestError as error:
                    self.unused.append(f"{name}={value!r}: {error}")
                else:
                    fields[field] = (*fields.get(field, ()), *asked) if _is_ids(asked) else asked
        if self._contents.get("do_sample") is False:
            fields["temperature"] = 0.0
        most = fields.get("max_new_tokens")
        if most is not None and fields.get("min_new_tokens", 0) > most:
            self.unused.append(
                f"min_new_tokens={fields.pop('min_new_tokens')}: above max_new_tokens={most}"
            )
        return SamplingParams(**fields)

    def _read(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Fields of SamplingParams that a field of the file asks for."""
        if name in _PLAIN:
            yield name, value
        elif name == "top_p":
            # transformers leaves 1 and more out.
            yield name, _SMALLEST_TOP_P if value == 0 else value
        elif name == "stop_strings":
            if self._has_tokenizer:
                yield "stop", value
            else:
                self.unused.append(f"{name}={value!r}: there is no tokenizer")
        elif name == "suppress_tokens":
            yield from self._forbid(name, value)
        elif name == "bad_words_ids":
            yield from self._forbid(name, self._single(name, value))
        elif name == "sequence_bias":
            yield from self._bias(name, value)
        elif not self._asks_for_nothing(name, value):
            self.unused.append(f"{name}={value!r}")

    def _forbid(self, name: str, ids: Any) -> Iterator[tuple[str, Any]]:
        """Tokens that are never generated; those that the model lacks need no rule."""
        if _is_ids(ids):
            known = tuple(token for token in ids if 0 <= token < self._model.vocab_size)
            if len(known) < len(ids):
                wrong = [token for token in ids if token not in known]
                self.unused.append(f"{name}: no tokens of the model: {wrong}")
            if known:
                yield "bad_token_ids", known
        else:
            self.unused.append(f"{name}={ids!r}: must be a list of token ids")

    def _single(self, name: str, words: Any) -> Any:
        """The one token of each forbidden sequence; end tokens stay allowed, as in transformers."""
        if not isinstance(words, list) or not all(_is_ids(word) for word in words):
            self.unused.append(f"{name}={words!r}: must be lists of token ids")
            return ()
        longer = [word for word in words if len(word) != 1]
        if longer:
            self.unused.append(f"{name}: sequences of several tokens: {longer}")
        ends = self._model.eos_token_ids
        return [word[0] for word in words if len(word) == 1 and word[0] not in ends]

    def _bias(self, name: str, pairs: Any) -> Iterator[tuple[str, Any]]:
        """The bias of each sequence of one token: `[[ids, bias], ...]` in JSON."""
        biases: dict[int, float] = {}
        for pair in pairs if isinstance(pairs, list) else [pairs]:
            is_pair = isinstance(pair, list) and len(pair) == 2 and _is_ids(pair[0])
            if not is_pair or len(pair[0]) != 1 or not _is_bias(pair[1]):
                self.unused.append(f"{name}: {pair!r} is no bias of one token within 100")
            elif pair[0][0] >= self._model.vocab_size:
                self.unused.append(f"{name}: {pair[0][0]} is no token of the model")
            else:
                biases[pair[0][0]] = float(pair[1])
        if biases:
            yield "logit_bias", biases

    def _asks_for_nothing(self, name: str, value: Any) -> bool:
        if name in _READ_ELSEWHERE or name in _WITHOUT_EFFECT:
            return True
        if name in _OF_BEAMS and self._contents.get("num_beams", 1) == 1:
            return True
        if name == "max_length":
            return isinstance(value, int) and value >= self._model.context_length
        return value in _NEUTRAL.get(name, ())


def _is_ids(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(type(each) is int for each in value)


def _is_bias(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and abs(value) <= MAX_LOGIT_BIAS  # false for NaN too
