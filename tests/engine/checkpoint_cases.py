"""Checkpoints to write and read, and how to compare and forge them."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sgljax_engine import EngineCheckpoint, RequestCheckpoint, SamplingParams, SchedulerCheckpoint
from sgljax_engine.checkpoint.manager import _NUM_SIGNED, REQUESTS_NAME, _arrays_name, _signed
from sgljax_engine.sampling_params import LogprobOptions
from sgljax_engine.types import FinishReason, PromptLogprobs, RequestStatus, TopLogprobs

RICH_PARAMS = SamplingParams(
    n=8,
    temperature=0.7,
    top_k=50,
    top_p=0.95,
    min_p=0.05,
    presence_penalty=0.1,
    frequency_penalty=0.2,
    repetition_penalty=1.1,
    logit_bias={17: -1.5, 4: 2.0},
    bad_token_ids=(9, 10, 11),
    seed=2**60 + 1,
    max_new_tokens=4096,
    min_new_tokens=1,
    stop=("</answer>", "\n\nQ:", "\u00fc\u4f60\U0001f600"),
    stop_token_ids=(1, 2),
    include_stop_str_in_output=True,
    skip_special_tokens=False,
    return_sampling_mask=True,
)


def make_request(
    index: int,
    *,
    num_tokens: int = 5,
    status: RequestStatus = RequestStatus.RUNNING,
    call: int = 3,
    age_s: float = 12.25,
    seed: int = 0,
) -> RequestCheckpoint:
    """A request with every field set; other seeds give other tokens and log-probs."""
    rng = np.random.default_rng([seed, index])
    prompt = rng.integers(0, 150_000, 6).tolist()
    options = LogprobOptions(enabled=True, start_len=0, top_num=2, token_ids=(5, 6, 7))

    def floats(count: int) -> list[float]:
        return (-rng.random(count, np.float32) * 20).tolist()

    def extras(count: int) -> list[TopLogprobs]:
        return [
            TopLogprobs(floats(2), rng.integers(0, 99, 2).tolist(), floats(3)) for _ in range(count)
        ]

    is_finished = status is RequestStatus.FINISHED
    return RequestCheckpoint(
        rid=f"{index:032x}-3",
        group=f"{index:032x}",
        call=call,
        prompt_ids=prompt,
        params=RICH_PARAMS,
        seed=2**62 + index,
        logprob_options=options,
        status=status,
        finish=FinishReason("stop", matched="</answer>") if is_finished else None,
        output_ids=rng.integers(0, 150_000, num_tokens).tolist(),
        logprobs=floats(num_tokens),
        scaled_logprobs=floats(num_tokens),
        processed_logprobs=floats(num_tokens),
        extra_logprobs=extras(num_tokens),
        sampling_masks=[array("i", range(index, index + n + 1)) for n in range(num_tokens)],
        prompt_logprobs=PromptLogprobs([None, *floats(5)], [None, *extras(5)]),
        token_versions=sorted(rng.integers(0, 3, num_tokens).tolist()),
        num_cached=4,
        num_retractions=2,
        num_cache_misses=1,
        age_s=age_s,
        first_token_s=0.0625 if num_tokens else None,
    )


def make_checkpoint(
    requests: list[RequestCheckpoint], metadata: dict[str, Any] | None = None
) -> EngineCheckpoint:
    return EngineCheckpoint(
        scheduler_state=SchedulerCheckpoint(
            requests={request.rid: request for request in requests},
            new_token_ratio=0.375,
        ),
        metadata={"weight_version": 7} if metadata is None else metadata,
        timestamp=1.75e9,
    )


def fingerprint(checkpoint: EngineCheckpoint) -> str:
    """Equal for equal contents; unlike ==, it knows NaN from NaN, 0.0 from -0.0 and 1 from 1.0."""
    return repr(checkpoint)


# ---------------------------------------------------------------------- forgeries


def read_tree(folder: Path) -> dict[str, Any]:
    """The contents of `requests.json` without its checksum."""
    return json.loads(b"{" + (folder / REQUESTS_NAME).read_bytes()[_NUM_SIGNED:])


def forge(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes `requests.json` and gives it the checksum that it should have."""
    tree = read_tree(folder)
    change(tree)
    text = json.dumps(tree, separators=(",", ":"), ensure_ascii=False)
    (folder / REQUESTS_NAME).write_bytes(_signed(text.encode("utf-8", "surrogatepass")))


def forge_arrays(folder: Path, data: bytes) -> None:
    """Replaces the arrays, and their checksum in `requests.json`."""
    forge(folder, lambda tree: tree.update(arrays=hashlib.sha256(data).hexdigest()))
    (folder / _arrays_name(read_tree(folder))).write_bytes(data)
