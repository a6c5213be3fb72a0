"""Draws pictures of docs/architecture.md, fleet.md, interruptions.md and tunix.md, as SVG.

    python docs/make_diagrams.py                 # after a change here
    python docs/make_diagrams.py --output /tmp/x --format png    # to look at them

Letters are outlines, so that the pictures are the same everywhere.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

IMAGES = Path(__file__).parent / "images"
INK, PAPER, LIGHT = "#263238", "#ffffff", "#eceff1"
RED_INK = "#b71c1c"
BLUE, ORANGE, GREEN, GREY, RED = "#bbdefb", "#ffe0b2", "#c8e6c9", "#cfd8dc", "#ffcdd2"
Point = tuple[float, float]


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure whose units are tenths of an inch, y downwards."""
    figure = Figure(figsize=(width / 10, height / 10), facecolor=PAPER)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    return figure, axes


def text(axes: Axes, at: Point, words: str, size: float = 9, **style: str) -> None:
    """Text centred at a point unless `ha` says otherwise."""
    style = {"ha": "center", "va": "center", "color": INK} | style
    axes.text(*at, words, fontsize=size, **style)  # type: ignore[arg-type]


def box(
    axes: Axes, at: Point, size: Point, words: str, colour: str = LIGHT, font: float = 9
) -> None:
    """A rounded box by its top left corner, with text in its middle."""
    shape = FancyBboxPatch(at, *size, "round,pad=0,rounding_size=0.8", fc=colour, ec=INK, lw=0.8)
    axes.add_patch(shape)
    text(axes, (at[0] + size[0] / 2, at[1] + size[1] / 2), words, font)


def arrow(axes: Axes, start: Point, end: Point, words: str = "", at: Point | None = None) -> None:
    """An arrow with words at its middle, or at a point."""
    style = {"arrowstyle": "-|>", "mutation_scale": 9, "lw": 0.9, "color": INK}
    axes.add_patch(FancyArrowPatch(start, end, shrinkA=0, shrinkB=0, **style))
    if words:
        middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 - 1.3)
        text(axes, at or middle, words, 8)


def threads() -> Figure:
    """Who does what, and what is handed from one to another."""
    figure, axes = canvas(84, 42)
    columns = (
        (1, 20, "callers' threads", BLUE),
        (31, 22, "engine thread", ORANGE),
        (63, 20, "detokenizer thread", GREEN),
    )
    for left, width, title, colour in columns:
        axes.add_patch(FancyBboxPatch((left, 1), width, 26, "round,pad=0", fc=colour, ec="none"))
        text(axes, (left + width / 2, 3), title, 10, weight="bold")
    for top, words in ((6, "tokenise, check"), (12, "wait on a future,\nor read a stream")):
        box(axes, (3, top), (16, 4.4), words, PAPER)
    for top, words in (
        (5, "take commands"),
        (10, "schedule()"),
        (15, "prefill(), decode()\non the device"),
        (21, "update(): tokens, stops"),
    ):
        box(axes, (33, top), (18, 4.2), words, PAPER)
    for top, words in ((8, "tokens to text,\nstop strings"), (16, "answer futures\nand streams")):
        box(axes, (65, top), (16, 4.8), words, PAPER)
    for top in (9.2, 14.2, 19.2):
        arrow(axes, (42, top), (42, top + (1.8 if top > 19 else 0.8)))
    arrow(axes, (19, 8), (33, 7), "commands")
    arrow(axes, (51, 23), (65, 11), "tokens", (57.5, 15.3))
    arrow(axes, (73, 12.8), (73, 16))
    axes.plot([73, 73, 25, 25], [20.8, 40, 40, 14.2], color=INK, lw=0.9)
    arrow(axes, (25, 14.2), (19, 14.2))
    text(axes, (60, 38.8), "outputs", 8)
    axes.plot([33, 32, 32], [23, 23, 7.8], color=INK, lw=0.9)
    arrow(axes, (32, 7.8), (33, 7.8))
    box(axes, (31, 32), (22, 5), "updates and checkpoints:\na thread each, when first needed", GREY)
    arrow(axes, (42, 32), (42, 27.2), "swap, snapshot", (48, 29.7))
    text(axes, (11, 32), "one thread owns queues,\npages, weights, device:\nno locks inside", 8)
    return figure


def request_life() -> Figure:
    """The states of a request and what moves it."""
    figure, axes = canvas(84, 34)
    box(axes, (2, 10), (15, 6), "WAITING\nno pages", BLUE)
    box(axes, (33, 10), (15, 6), "RUNNING\nprefilling", ORANGE)
    box(axes, (62, 10), (18, 6), "RUNNING\ndecoding", ORANGE)
    box(axes, (62, 25), (18, 6), "FINISHED\nanswered", GREEN)
    arrow(axes, (9.5, 3), (9.5, 10))
    text(axes, (9.5, 2), "generate()", 8)
    arrow(axes, (17, 12), (33, 12), "there is room", (25, 10.7))
    arrow(axes, (48, 13), (62, 13), "prompt done", (55, 11.7))
    axes.plot([71, 71, 12, 12], [10, 4, 4, 8.6], color=INK, lw=0.9)
    arrow(axes, (12, 8), (12, 10))
    text(axes, (42, 2.6), "retracted (pages run out, pause, update): keeps its tokens", 8)
    arrow(axes, (33, 14.5), (17, 14.5))
    text(axes, (25, 15.8), "retracted", 8)
    arrow(axes, (71, 16), (71, 25))
    text(axes, (60.5, 20.5), "stop token or string,\nmax_new_tokens, or aborted", 8)
    axes.plot([9.5, 9.5], [16, 28], color=RED_INK, lw=0.9, ls="--")
    axes.plot([40.5, 40.5], [16, 28], color=RED_INK, lw=0.9, ls="--")
    axes.plot([9.5, 60], [28, 28], color=RED_INK, lw=0.9, ls="--")
    arrow(axes, (60, 28), (62, 28))
    text(axes, (25, 29.5), "aborted: answered with what it has", 8)
    return figure


def _bar(axes: Axes, at: Point, width: float, colour: str, words: str = "") -> None:
    axes.add_patch(FancyBboxPatch(at, width, 3, "square,pad=0", fc=colour, ec=INK, lw=0.6))
    text(axes, (at[0] + width / 2, at[1] + 1.55), words, 7.5)


def _lanes(axes: Axes, rows: Sequence[tuple[str, Sequence[tuple[float, float, str, str]]]]) -> None:
    """Named rows of bars: each (start, end, colour, words)."""
    for row, (name, bars) in enumerate(rows):
        top = 6 + 5 * row
        text(axes, (1, top + 1.5), name, 9, ha="left", family="monospace")
        for start, end, colour, words in bars:
            _bar(axes, (start, top), end - start, colour, words)


def pause_modes() -> Figure:
    """One request that decodes while generation is paused and goes on, in each mode."""
    figure, axes = canvas(88, 31)
    _lanes(
        axes,
        (
            (
                "retract",
                (
                    (16, 34, ORANGE, "decode"),
                    (34, 56, GREY, "waits, no pages"),
                    (56, 65, BLUE, "prefill again"),
                    (65, 86, ORANGE, "decode"),
                ),
            ),
            (
                "in_place",
                (
                    (16, 34, ORANGE, "decode"),
                    (34, 56, GREY, "held, keeps its pages"),
                    (56, 80, ORANGE, "decode"),
                ),
            ),
            (
                "abort",
                ((16, 34, ORANGE, "decode"), (34, 50, RED, "answered: abort")),
            ),
            (
                "wait",
                (
                    (16, 34, ORANGE, "decode"),
                    (34, 47, ORANGE, "decodes to its end"),
                    (47, 56, GREEN, "answered"),
                ),
            ),
        ),
    )
    for x, words in ((34, "pause_generation(mode)"), (56, "continue_generation()")):
        axes.plot([x, x], [3.5, 26], color=RED_INK, lw=1, ls="--")
        text(axes, (x, 2.2), words, 8, color=RED_INK)
    text(axes, (51, 28.6), "time: no request is lost; those that come meanwhile wait", 8)
    return figure


def sleep_levels() -> Figure:
    """What of an engine is where while it sleeps."""
    figure, axes = canvas(84, 36)
    heads = ("awake", "sleep(1)", "sleep(2)", "preserve_state")
    for column, head in enumerate(heads):
        text(axes, (22 + 18 * column, 2.5), head, 9, weight="bold")
    for top, name in ((5, "device"), (20, "host")):
        text(axes, (1, top + 6), name, 10, ha="left", weight="bold")
        for column in range(4):
            corner = (14.5 + 18 * column, top)
            shape = FancyBboxPatch(corner, 15, 12, "round,pad=0", fc=PAPER, ec=INK, lw=0.8)
            axes.add_patch(shape)
    places = (
        (0, 6, "weights", BLUE),
        (0, 11.5, "KV pages, prefixes", ORANGE),
        (1, 21, "weights", BLUE),
        (3, 21, "weights", BLUE),
        (3, 26.5, "KV pages in use", ORANGE),
    )
    for column, top, words, colour in places:
        box(axes, (15.5 + 18 * column, top), (13, 4.6), words, colour, 8)
    for column in range(1, 4):
        text(axes, (22 + 18 * column, 11), "free for others", 8, style="italic")
    for column, words in (
        (1, "requests are\nprefilled again"),
        (2, "weights must come\nby update_weights"),
        (3, "requests go on\nbit for bit"),
    ):
        text(axes, (22 + 18 * column, 34), words, 8)
    for column in (0, 2):
        text(axes, (22 + 18 * column, 26), "requests only", 8, style="italic")
    return figure


def weight_versions() -> Figure:
    """Tokens of two requests across two updates, coloured by the weights that sampled them."""
    figure, axes = canvas(84, 25)
    colours = (BLUE, ORANGE, GREEN)
    first, pitch, updates = 16, 3.5, (6, 13)
    for row, (name, begin, end) in enumerate((("request a", 0, 17), ("request b", 4, 19))):
        top = 7 + 6 * row
        text(axes, (1, top + 1.5), name, 9, ha="left")
        for i in range(begin, end):
            version = sum(i >= update for update in updates)
            _bar(axes, (first + pitch * i, top), 3.1, colours[version], str(version))
    for version, i in enumerate(updates, start=1):
        x = first + pitch * i - 0.2
        axes.plot([x, x], [4, 19.5], color=RED_INK, lw=1, ls="--")
        text(axes, (x, 2.5), f"update: version {version}", 8, color=RED_INK)
    words = "token_weight_versions: which weights sampled each token; its log-prob is theirs too"
    text(axes, (44, 22.3), words, 8)
    return figure


def _panel(axes: Axes, at: Point, size: Point, colour: str = PAPER) -> None:
    """A box that others lie in."""
    axes.add_patch(FancyBboxPatch(at, *size, "round,pad=0", fc=colour, ec=INK, lw=0.8))


def placement() -> Figure:
    """How a mesh is cut into engines, and what lies on the devices of one of them."""
    figure, axes = canvas(88, 35)
    text(axes, (26.5, 2.5), 'mesh ("fsdp" 4, "tp" 2)', 9, weight="bold")
    for row in range(2):
        text(axes, (1, 12.1 + 6.5 * row), f"tp {row}", 9, ha="left")
    for column in range(4):
        left = 7 + 10 * column
        text(axes, (left + 4.25, 6), f"fsdp {column}", 9)
        _panel(axes, (left, 8), (8.5, 21.5), GREY)
        for row in range(2):
            words = f"d{2 * column + row}"
            box(axes, (left + 1.25, 9.6 + 6.5 * row), (6, 5), words, PAPER)
        text(axes, (left + 4.25, 25.9), f"engine {column}", 9, weight="bold")
    text(axes, (26.5, 32.5), "a submesh an engine, cut along every axis but the tensor axis", 8)

    text(axes, (69.5, 2.5), "engine 3", 9, weight="bold")
    _panel(axes, (52, 5), (35, 24.5), GREY)
    for top, end in ((8, 5), (29.5, 29.5)):
        axes.plot([45.5, 52], [top, end], color=INK, lw=0.9, ls=":")
    for column, (device, half) in enumerate((("d6", "first"), ("d7", "second"))):
        left = 53.2 + 16.7 * column
        _panel(axes, (left, 6.2), (15.9, 16.8))
        text(axes, (left + 7.95, 7.7), device, 9)
        for top, height, words, colour in (
            (9.2, 5.6, f"{half} half of heads,\nMLP, vocabulary", BLUE),
            (15.2, 2.8, "all norms", BLUE),
            (18.4, 4.0, f"KV pages: {half}\nhalf of KV heads", ORANGE),
        ):
            box(axes, (left + 0.9, top), (14.1, height), words, colour, 8)
    box(axes, (53.2, 24), (32.6, 4.5), "one scheduler, prefix cache and pool of pages", GREEN, 8)
    text(axes, (69.5, 32.5), "weights and KV pages, sharded over the tensor axis", 8)
    return figure


def fleet() -> Figure:
    """Where the parts of a fleet are, and what happens when one dies."""
    figure, axes = canvas(88, 44)
    box(axes, (2, 13), (17, 8), "trainer\npolicy, optimizer,\nno engine", BLUE)
    box(axes, (35, 14), (15, 6), "router\n(sglang, vllm)", GREY)
    box(
        axes,
        (2, 33),
        (48, 6),
        "weight store: a folder or bucket; version 7 (base), 8, 9 (changes)",
        GREEN,
    )
    for row in range(3):
        box(axes, (68, 4 + 11 * row), (18, 6), f"worker {row}\nengine, version 9", ORANGE)
        arrow(axes, (50, 17), (68, 7 + 11 * row))
    arrow(axes, (19, 15.5), (35, 15.5), "ids, seeds")
    arrow(axes, (35, 18.5), (19, 18.5))
    text(axes, (27, 19.9), "ids, log-probs,\nversions, replica", 8, va="top")
    text(axes, (57.5, 9.6), "joined workers", 8)
    arrow(axes, (10.5, 21), (10.5, 33), "writes", (14.5, 28.5))
    axes.plot([50, 60, 60], [36, 36, 31], color=INK, lw=0.9)
    arrow(axes, (60, 31), (68, 31))
    text(axes, (56, 34.5), "workers read", 8)
    for at, words in (
        ((10.5, 10.2), "dies: workers serve on;\nit resumes with a base"),
        ((42.5, 10.8), "dies: requests wait;\nworkers join again"),
        ((77, 12.4), "dies: its requests go to others"),
        ((77, 34.4), "starts: reads the newest, then joins"),
        ((26, 41.2), "damaged: refused by checksums, and written again whole"),
    ):
        text(axes, at, words, 8, color=RED_INK)
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    "threads": threads,
    "request_life": request_life,
    "pause_modes": pause_modes,
    "sleep_levels": sleep_levels,
    "weight_versions": weight_versions,
    "placement": placement,
    "fleet": fleet,
}


def main(argv: list[str] | None = None) -> None:
    """Draws all of them."""
    parser = argparse.ArgumentParser(description="Draw the pictures of the documentation.")
    parser.add_argument("--output", type=Path, default=IMAGES)
    parser.add_argument("--format", choices=("svg", "png"), default="svg")
    args = parser.parse_args(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    settings: dict[Any, Any] = {
        "svg.fonttype": "path",
        "svg.hashsalt": "docs",
        "font.family": "DejaVu Sans",
    }
    with mpl.rc_context(settings):
        for name, draw in PICTURES.items():
            metadata = {"Date": None, "Creator": None} if args.format == "svg" else None
            path = args.output / f"{name}.{args.format}"
            draw().savefig(path, dpi=130, metadata=metadata)


if __name__ == "__main__":
    main()
