"""What the engine thread gives for a checkpoint, and what it gets from one.

A snapshot only names requests and counts their tokens: lists of a request only grow, so whoever
writes the checkpoint may read them while the engine goes on.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from sgljax_engine.cache.kv_pages import PageLayout
from sgljax_engine.checkpoint.prefix import LayerPages, PrefixCheckpoint
from sgljax_engine.checkpoint.request import RequestCheckpoint
from sgljax_engine.processing.futures import Answer
from sgljax_engine.runner.saved_pages import SavedPages
from sgljax_engine.types import FinishReason, PageStamp, PromptLogprobs, Request, RequestStatus
from sgljax_engine.weights.digest import WeightsDigest


class RequestMark(NamedTuple):
    """A request at one moment; what changes later but by growing is noted here."""

    request: Request
    num_tokens: int
    status: RequestStatus
    prompt_logprobs: PromptLogprobs | None
    finish: FinishReason | None = None
    error: str | None = None

    def checkpoint(self, now_s: float) -> RequestCheckpoint:
        """What is kept of it; any thread."""
        return RequestCheckpoint.of(
            self.request,
            call=self.request.call,
            num_tokens=self.num_tokens,
            now_s=now_s,
            status=self.status,
            prompt_logprobs=self.prompt_logprobs,
            finish=self.finish,
            error=self.error,
        )


class PrefixSnapshot(NamedTuple):
    """The prefix cache at one moment, without its keys and values.

    Attributes:
        nodes: See `RadixCache.full_pages`.
        stamps: Of the nodes' pages.
        geometry: See `KVMemory.geometry`.
        layouts: See `KVMemory.layouts`.
    """

    nodes: list[tuple[int, tuple[int, ...], int]]
    stamps: list[PageStamp]
    geometry: dict[str, Any]
    layouts: tuple[PageLayout, ...]

    def checkpoint(self, copied: Collection[int], contents: SavedPages) -> PrefixCheckpoint | None:
        """What is kept of it, None if that is nothing; any thread.

        Args:
            copied: Pages that were copied before they changed. What lies behind others goes too.
            contents: Those of the pages, others perhaps.
        """
        places: dict[int, int] = {-1: -1}
        kept: list[tuple[int, tuple[int, ...]]] = []
        pages: list[int] = []
        for index, (parent, tokens, page) in enumerate(self.nodes):
            if page in copied and parent in places:
                places[index] = len(kept)
                kept.append((places[parent], tokens))
                pages.append(page)
        if not kept:
            return None
        return PrefixCheckpoint(
            **self.geometry,
            nodes=kept,
            pages=[LayerPages(*layer) for layer in contents.take(pages, self.layouts)],
        )


class CopiedPages(NamedTuple):
    """What one `CopyPages` did.

    Attributes:
        num_done: Stamps that are dealt with, the first ones.
        pages: Those that had not changed.
        contents: Theirs, others perhaps; None without any.
    """

    num_done: int
    pages: list[int]
    contents: SavedPages | None


class Snapshot(NamedTuple):
    """An engine at one moment.

    Attributes:
        marks: Running requests, then waiting ones, both in order, then finished ones.
        new_token_ratio: Of the admission policy.
        weight_version: Of the weights that serve.
        weights: Their digest; any thread may make it.
        prefix: None if there is none, or none was asked for.
    """

    marks: list[RequestMark]
    new_token_ratio: float
    weight_version: int
    weights: WeightsDigest
    prefix: PrefixSnapshot | None


class RestoredRequest(NamedTuple):
    """A request on its way back into an engine.

    Attributes:
        request: Waits, or is finished.
        answer: Gets its whole output.
        call: Of the checkpoint; see `Request.call`.
        had_pages: It was running.
        error: What it failed with.
    """

    request: Request
    answer: Answer
    call: int
    had_pages: bool
    error: str | None

    @property
    def is_unfinished(self) -> bool:
        """Whether it goes on."""
        return self.request.status is not RequestStatus.FINISHED


class Restoration(NamedTuple):
    """What is to be restored.

    Attributes:
        requests: In the order in which they shall go on.
        new_token_ratio: See `SchedulerCheckpoint`.
        weight_version, weights_digest: Of the weights that served.
        prefix_cache: Keys and values that those weights computed.
    """

    requests: list[RestoredRequest]
    new_token_ratio: float
    weight_version: int
    weights_digest: str | None
    prefix_cache: PrefixCheckpoint | None

    @property
    def unfinished(self) -> list[Request]:
        """The requests that go on, for which a group chooses engines."""
        return [each.request for each in self.requests if each.is_unfinished]

    def part(self, index: int, num_engines: int) -> Restoration:
        """What one engine takes: its requests, and the pages that they begin with.

        A single engine takes all pages.
        """
        if num_engines == 1:
            return self
        own = [each for each in self.requests if each.request.engine == index]
        wanted = [each.request.prompt_ids + each.request.output_ids for each in own]
        prefix = self.prefix_cache
        prefix = None if prefix is None else prefix.of_sequences(wanted)
        return self._replace(requests=own, prefix_cache=prefix)
