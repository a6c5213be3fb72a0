"""Where the time of a training step goes, part by part, from a timeline of some steps.

    python examples/grpo_reasoning.py --steps 4 --held-out 16 --timeline outputs/step.pftrace
    python benchmarks/throughput/step_time.py outputs/step.pftrace    # on the same machine
    python docs/make_step_plot.py                                     # draws the result

A timeline of any other run will do as well (docs/observability.md, `tunix-sgljax train
--timeline`). A step lasts from the end of a weight sync to the end of the next one; the first of
the file from its first event on. Its parts do not overlap:

- tokenize: prompts to ids, on the trainer's side.
- prefill, decode: the engine thread in these dispatches. While a timeline records, the engine waits
  for a prefill before it dispatches the decode.
- host: the rest of `generate`: requests, scheduling, the last texts, padding.
- log-probs: of the weights that sampled or of the reference, where the loss needs them beforehand.
- trainer: gradients and optimizer.
- sync: the new weights, to the engine.
- rest: rewards, advantages, Tunix's own.

The detokenizer has a thread of its own: its seconds are told, but are no part of the sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

from benchmarks.lib.reporting import make_parser, output_dir, write_results

Span = tuple[float, float]
"""Seconds of its begin and end."""

PARTS = ("tokenize", "prefill", "decode", "host", "log-probs", "trainer", "sync", "rest")
_LOG_PROBS = ("get_per_token_logps", "old_actor_inference", "reference_inference")


class Timed(NamedTuple):
    """A slice of a thread."""

    thread: str
    name: str
    span: Span


class StepTime(NamedTuple):
    """Seconds of a step.

    Attributes:
        total_s: From one weight sync's end to the next one's.
        parts: By the names of `PARTS`; they add up to `total_s`.
        detokenizer_s: Of the detokenizer's thread, beside the others.
    """

    total_s: float
    parts: dict[str, float]
    detokenizer_s: float


def read_slices(path: Path) -> list[Timed]:
    """The slices of the threads of a timeline; without instants, counters and devices."""
    trace = Trace()
    trace.ParseFromString(path.read_bytes())
    threads: dict[int, str] = {}
    open_slices: dict[int, list[tuple[str, float]]] = {}
    found = []
    for packet in trace.packet:
        descriptor, event = packet.track_descriptor, packet.track_event
        if descriptor.HasField("thread"):
            threads[descriptor.uuid] = descriptor.thread.thread_name
            open_slices[descriptor.uuid] = []
        elif event.track_uuid not in threads:
            continue
        elif event.type == TrackEvent.TYPE_SLICE_BEGIN:
            open_slices[event.track_uuid].append((event.name, packet.timestamp / 1e9))
        elif event.type == TrackEvent.TYPE_SLICE_END:
            name, begin_s = open_slices[event.track_uuid].pop()
            span = (begin_s, packet.timestamp / 1e9)
            found.append(Timed(threads[event.track_uuid], name, span))
    return found


def union_s(spans: Iterable[Span], within: Iterable[Span]) -> float:
    """Seconds in which at least one of some spans lasts, of those of others that do not overlap."""
    total, windows = 0.0, list(within)
    for begin, end in windows:
        last = begin
        for start, stop in sorted(spans):
            start, stop = max(start, last), min(stop, end)
            if stop > start:
                total += stop - start
                last = stop
    return total


def step_times(slices: Sequence[Timed]) -> list[StepTime]:
    """The steps of a timeline, in order."""

    def spans(*names: str, thread: str = "trainer") -> list[Span]:
        return [each.span for each in slices if each.name in names and thread in each.thread]

    syncs = sorted(spans("update_params"))
    begins = [min((each.span[0] for each in slices), default=0.0), *(end for _, end in syncs)]
    steps = []
    for begin, (_, end) in zip(begins[:-1], syncs, strict=True):
        step = [(begin, end)]
        in_generate = union_s(spans("generate"), step)
        parts = {
            "tokenize": union_s(spans("tokenize"), step),
            "prefill": union_s(spans("prefill", thread="engine"), step),
            "decode": union_s(spans("decode", thread="engine"), step),
            "log-probs": union_s(spans(*_LOG_PROBS), step),
            "trainer": union_s(spans("train", "train critic"), step),
            "sync": union_s(spans("update_params"), step),
        }
        parts["host"] = in_generate - parts["prefill"] - parts["decode"]
        parts["rest"] = end - begin - sum(parts.values())
        detokenizer_s = union_s(spans("detokenize", thread="detokenizer"), step)
        ordered = {name: parts[name] for name in PARTS}
        steps.append(StepTime(end - begin, ordered, detokenizer_s))
    return steps


def lines_of(steps: Sequence[StepTime]) -> list[str]:
    """The report's table: each step, and the mean of all."""
    num, total_s = len(steps), sum(step.total_s for step in steps)
    names = [f"step {number}" for number in range(1, num + 1)]
    lines = [
        f"| part, seconds | {' | '.join(names)} | mean | share |",
        f"|---|{'---:|' * (num + 2)}",
    ]
    for part in PARTS:
        seconds = [step.parts[part] for step in steps]
        cells = [f"{each:.3f}" for each in (*seconds, sum(seconds) / num)]
        lines.append(f"| {part} | {' | '.join(cells)} | {sum(seconds) / total_s:.1%} |")
    cells = [f"{each:.3f}" for each in (*(step.total_s for step in steps), total_s / num)]
    lines += [f"| all | {' | '.join(cells)} | |", ""]
    beside = sum(step.detokenizer_s for step in steps) / num
    lines.append(f"The detokenizer's thread took {beside:.3f} s a step, beside the others.")
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Reads a timeline and writes the results."""
    parser = make_parser(__doc__)
    parser.add_argument("timeline", type=Path, help="a .pftrace file")
    parser.add_argument("--about", default="", help="the run, in a line of the report")
    args = parser.parse_args(argv)
    steps = step_times(read_slices(args.timeline))
    if not steps:
        parser.error(f"{args.timeline} holds no step: none ends with a weight sync")
    write_results(
        output_dir(args) / "step_time.md",
        "Where the time of a training step goes",
        "benchmarks/throughput/step_time.py",
        lines_of(steps),
        {"about": args.about, "steps": [step._asdict() for step in steps]},
        facts=[args.about] if args.about else [],
    )


if __name__ == "__main__":
    main()
