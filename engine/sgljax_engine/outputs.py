"""Outputs of requests. Host-only; no JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sgljax_engine.sampling_params import LogprobOptions
from sgljax_engine.types import FinishReason, PromptLogprobs, TopLogprobs

if TYPE_CHECKING:
    import numpy as np

LogprobEntry = tuple[float | None, int, None]
"""(log-prob, token id, None), as SGLang reports it; in SGLang the last is the token's text."""


@dataclasses.dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request, or a piece of a streamed one. All fields are host values.

    Attributes:
        rid: The request's id.
        text: The output as text, without the stop token and cut at a stop string; empty without
            a tokenizer or with detokenize=False.
        output_ids: Generated token ids, the stop token included, up to the one that completed a
            stop string.
        logprobs: log softmax(logits)[token] for each output token: the *raw* log-prob.
        processed_logprobs: The log-prob of each token in the distribution that it was drawn from,
            after penalties, biases, temperature and filters; 0 when greedy.
        scaled_logprobs: log softmax(logits / temperature)[token], equal to `logprobs` at
            temperature 1 and when greedy. It is what Tunix recomputes on the trainer's side.
        extra_logprobs: What `LogprobOptions` asked for at each output token, else empty.
        sampling_masks: For each output token, the int32 ids of those that it was drawn from, the
            likeliest first; empty without `SamplingParams.return_sampling_mask`.
        prompt_logprobs: Log-probs of the prompt, if asked for; a stream has them in its first
            piece.
        logprob_options: Which log-probs were asked for.
        prompt_ids: The prompt.
        finish: Why it ended; None in a streamed piece that is not the last.
        num_cached_tokens: Prompt tokens whose KV came from the prefix cache.
        num_completion_tokens: Output tokens so far, those of earlier pieces included.
        num_cache_misses: Programs compiled while it ran.
        e2e_latency_s: Seconds from the call to the last token.
        time_to_first_token_s: Seconds from the call to the end of the dispatch that produced the
            first token; None if there was none.
        num_retractions: Times it lost its pages and was prefilled again.
        token_weight_versions: For each output token, the weight version that sampled it;
            ascending.
        routed_experts: [tokens, num_layers, experts_per_token] uint8, or uint16 for more than 256
            experts: the experts that each token went through in each layer, by descending
            probability. Covers all tokens of prompt and output but the last, which the model has
            not seen. None without `enable_return_routed_experts`, in a streamed piece that is not
            the last, and for a request that was ended while some tokens had no keys.
        draft_sources: For each output token 0, or 1 plus the index of the drafter that proposed it;
            empty without speculation.
        replica_id: The server that sampled it; None in process.
    """

    rid: str
    text: str
    output_ids: list[int]
    logprobs: list[float]
    processed_logprobs: list[float]
    scaled_logprobs: list[float]
    extra_logprobs: list[TopLogprobs]
    prompt_logprobs: PromptLogprobs | None
    logprob_options: LogprobOptions
    prompt_ids: list[int]
    finish: FinishReason | None
    num_cached_tokens: int
    num_completion_tokens: int
    num_cache_misses: int
    e2e_latency_s: float
    time_to_first_token_s: float | None
    num_retractions: int
    token_weight_versions: list[int]
    routed_experts: np.ndarray | None = dataclasses.field(default=None, compare=False)
    draft_sources: list[int] = dataclasses.field(default_factory=list)
    sampling_masks: list[np.ndarray] = dataclasses.field(default_factory=list, compare=False)
    replica_id: str | None = dataclasses.field(default=None, compare=False)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens in the prompt."""
        return len(self.prompt_ids)

    @property
    def first_weight_version(self) -> int | None:
        """Version of the weights that sampled the first token; None without tokens."""
        return self.token_weight_versions[0] if self.token_weight_versions else None

    @property
    def weight_version(self) -> int | None:
        """Version of the weights that sampled the last token; None without tokens."""
        return self.token_weight_versions[-1] if self.token_weight_versions else None

    def to_dict(self) -> dict[str, Any]:
        """The dict that `Engine.generate` returns.

        If log-probs were asked for, `meta_info` also holds SGLang's lists, each entry a
        `(logprob, token id, None)` triple: `output_token_logprobs` (raw); if asked for,
        `input_token_logprobs` of the prompt from `logprob_start_len` on, and
        `{input,output}_top_logprobs` and `{input,output}_token_ids_logprobs` with a list of triples
        for each position. `output_processed_logprobs` and `output_scaled_logprobs` are this
        engine's own. `routed_experts` is there unless it is None. With sampling masks there are
        SGLang's `output_token_sampling_mask`, a list of ids for each token, and
        `output_token_sampling_logprobs`, the tokens' log-probs over these. With speculation there
        are also `draft_sources` and SGLang's `spec_accept_token_num`, the number of output tokens
        that were drafts.
        """
        finish = self.finish
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": finish and finish.to_dict(self.num_completion_tokens),
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "cached_tokens": self.num_cached_tokens,
            "cache_miss_count": self.num_cache_misses,
            "e2e_latency": self.e2e_latency_s,
            "time_to_first_token": self.time_to_first_token_s,
            "weight_version": self.weight_version,
            "first_weight_version": self.first_weight_version,
            "token_weight_versions": list(self.token_weight_versions),
        }
        if self.logprob_options.enabled:
            meta["output_token_logprobs"] = _entries(self.logprobs, self.output_ids)
            meta["output_processed_logprobs"] = _entries(self.processed_logprobs, self.output_ids)
            meta["output_scaled_logprobs"] = _entries(self.scaled_logprobs, self.output_ids)
            meta |= self._extras("output", self.extra_logprobs)
            if self.prompt_logprobs is not None:
                prompt = self.prompt_ids[self.logprob_options.start_len :]
                meta["input_token_logprobs"] = _entries(self.prompt_logprobs.logprobs, prompt)
                meta |= self._extras("input", self.prompt_logprobs.extras)
        if self.sampling_masks:
            meta["output_token_sampling_mask"] = [each.tolist() for each in self.sampling_masks]
            meta["output_token_sampling_logprobs"] = list(self.processed_logprobs)
        if self.draft_sources:
            meta["spec_accept_token_num"] = sum(source > 0 for source in self.draft_sources)
            meta["draft_sources"] = list(self.draft_sources)
        if self.routed_experts is not None:
            meta["routed_experts"] = self.routed_experts
        return {"text": self.text, "output_ids": list(self.output_ids), "meta_info": meta}

    def _extras(self, side: str, extras: Sequence[TopLogprobs | None]) -> dict[str, Any]:
        options = self.logprob_options
        lists: dict[str, Any] = {}
        if options.top_num:
            lists[f"{side}_top_logprobs"] = [
                extra and _entries(extra.values, extra.token_ids) for extra in extras
            ]
        if options.token_ids:
            lists[f"{side}_token_ids_logprobs"] = [
                extra and _entries(extra.chosen, options.token_ids) for extra in extras
            ]
        return lists


def _entries(logprobs: Sequence[float | None], ids: Sequence[int]) -> list[LogprobEntry]:
    return [(logprob, token_id, None) for logprob, token_id in zip(logprobs, ids, strict=True)]


_PIECEWISE = (
    *("output_ids", "logprobs", "processed_logprobs", "scaled_logprobs", "extra_logprobs"),
    *("token_weight_versions", "draft_sources", "sampling_masks"),
)
"""Lists of which each piece of a streamed request has its part."""


def join_pieces(pieces: Sequence[RequestOutput]) -> RequestOutput:
    """The whole output of a streamed request."""
    joined: dict[str, Any] = {
        name: [each for piece in pieces for each in getattr(piece, name)] for name in _PIECEWISE
    }
    joined["text"] = "".join(piece.text for piece in pieces)
    return dataclasses.replace(pieces[-1], prompt_logprobs=pieces[0].prompt_logprobs, **joined)
