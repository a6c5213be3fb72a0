"""Snapshots that the engine thread takes for a checkpoint, and what it restores from one.

A snapshot only names requests and counts their tokens. Lists of a request only grow, so another
thread may read them while the engine goes on.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from sgljax_engine.cache.kv_pages import PageLayout
from sgljax_engine.checkpoint.prefix import LayerPages, PrefixCheckpoint
from sgljax_engine.checkpoint.request import RequestCheckpoint
from sgljax_engine.processing.futures import Answer
from sgljax_engine.runner.kv.saved_pages import SavedPages
from sgljax_engine.types import FinishReason, PageStamp, PromptLogprobs, Request, RequestStatus
from sgljax_engine.weights.checksum import WeightsDigest


class RequestMark(NamedTuple):
    """A request at one moment: copies of the values that may change other than by growing."""

    request: Request
    num_tokens: int
    status: RequestStatus
    prompt_logprobs: PromptLogprobs | None
    finish: FinishReason | None = None
    error: str | None = None

    def checkpoint(self, now_s: float) -> RequestCheckpoint:
        """The request for a checkpoint. Any thread."""
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
        stamps: Stamps of the nodes' pages.
        geometry: See `KVMemory.geometry`.
        layouts: See `KVMemory.layouts`.
    """

    nodes: list[tuple[int, tuple[int, ...], int]]
    stamps: list[PageStamp]
    geometry: dict[str, Any]
    layouts: tuple[PageLayout, ...]

    def checkpoint(self, copied: Collection[int], contents: SavedPages) -> PrefixCheckpoint | None:
        """The prefix cache for a checkpoint; None if nothing of it was copied. Any thread.

        Args:
            copied: Pages that were copied before they changed. Nodes behind other pages are left
                out.
            contents: Contents of these pages, and perhaps of others.
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
    """Result of one `CopyPages`.

    Attributes:
        num_done: Number of stamps handled, from the first on.
        pages: Pages that had not changed.
        contents: Their contents, and perhaps others'; None without any.
    """

    num_done: int
    pages: list[int]
    contents: SavedPages | None


class Snapshot(NamedTuple):
    """An engine at one moment.

    Attributes:
        marks: Running requests, then waiting ones, both in order, then finished ones.
        new_token_ratio: Ratio of the admission policy.
        weight_version: Version of the serving weights.
        weights: Their digest; any thread may make it.
        prefix: The prefix cache; None without one, or if it was not asked for.
    """

    marks: list[RequestMark]
    new_token_ratio: float
    weight_version: int
    weights: WeightsDigest
    prefix: PrefixSnapshot | None


class RestoredRequest(NamedTuple):
    """A request on its way back into an engine.

    Attributes:
        request: A waiting request, or a finished one.
        answer: Gets its whole output.
        call: Its call in the checkpoint; see `Request.call`.
        had_pages: Whether it was running.
        error: The error that it failed with.
    """

    request: Request
    answer: Answer
    call: int
    had_pages: bool
    error: str | None

    @property
    def is_unfinished(self) -> bool:
        """Whether the request has to continue."""
        return self.request.status is not RequestStatus.FINISHED


class Restoration(NamedTuple):
    """A checkpoint's contents, to be restored.

    Attributes:
        requests: In the order in which they continue.
        new_token_ratio: See `SchedulerCheckpoint`.
        weight_version, weights_digest: Those of the weights that served.
        prefix_cache: Keys and values that those weights computed.
    """

    requests: list[RestoredRequest]
    new_token_ratio: float
    weight_version: int
    weights_digest: str | None
    prefix_cache: PrefixCheckpoint | None

    @property
    def unfinished(self) -> list[Request]:
        """The requests that continue, for which a group chooses engines."""
        return [each.request for each in self.requests if each.is_unfinished]

    def part(self, index: int, num_engines: int) -> Restoration:
        """One engine's part: its requests, and the pages that they begin with.

        A single engine takes all pages.
        """
        if num_engines == 1:
            return self
        own = [each for each in self.requests if each.request.engine == index]
        wanted = [each.request.prompt_ids + each.request.output_ids for each in own]
        prefix = self.prefix_cache
        prefix = None if prefix is None else prefix.of_sequences(wanted)
        return self._replace(requests=own, prefix_cache=prefix)
