"""The plot of a mismatch report: plain SVG text, so that no plotting library is needed."""

from __future__ import annotations

import numpy as np

_WIDTH, _LEFT, _RIGHT = 720, 70, 20
_CURVE_TOP, _CURVE_HEIGHT = 40, 180
_MAP_TOP, _MAP_HEIGHT = 290, 240
_MAX_CELLS = 64
"""Maximum rows and columns of the map; beyond it neighbours merge to their largest difference."""

_NUM_BLUES = 8

_FLOOR = 1e-8
"""Smaller differences are drawn as this value."""


def draw(difference_BC: np.ndarray, is_compared_BC: np.ndarray, tolerance: float) -> str:
    """An SVG: the largest and the mean difference at each position, and a map of all tokens.

    Args:
        difference_BC: Absolute differences; NaN counts as infinite.
        is_compared_BC: Which differences count.
        tolerance: Tolerance, drawn as a line; tokens beyond it are red in the map.
    """
    gaps_BC = np.where(np.isnan(difference_BC), np.inf, difference_BC)
    kept_BC = np.where(is_compared_BC, gaps_BC, np.nan)
    used = np.flatnonzero(is_compared_BC.any(axis=0))
    columns = kept_BC[:, : int(used[-1]) + 1] if used.size else kept_BC[:, :1]
    height = _MAP_TOP + _MAP_HEIGHT + 50
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
    )
    parts = [head, *_curves(columns, tolerance), *_map(columns, tolerance), "</svg>"]
    return "\n".join(parts) + "\n"


def _curves(columns: np.ndarray, tolerance: float) -> list[str]:
    counts = np.maximum((~np.isnan(columns)).sum(axis=0), 1)
    peaks = np.nanmax(np.nan_to_num(columns, nan=0.0), axis=0)
    means = np.nansum(columns, axis=0) / counts
    finite = peaks[np.isfinite(peaks)]
    top = np.ceil(np.log10(max([tolerance, _FLOOR, *finite]))) + 0.5
    bottom = np.log10(_FLOOR)

    def y(value: float) -> float:
        level = min(np.log10(max(value, _FLOOR)), top)
        return _CURVE_TOP + _CURVE_HEIGHT * (top - level) / (top - bottom)

    parts = [_text(_LEFT, 24, "|log-prob of the sampler - of the trainer| by position")]
    for power in range(int(bottom), int(np.floor(top)) + 1):
        at = y(10.0**power)
        parts += [_line(_LEFT, at, _WIDTH - _RIGHT, at, "#ddd")]
        parts += [_text(_LEFT - 6, at + 4, f"1e{power}", "end")]
    at = y(tolerance)
    parts += [_line(_LEFT, at, _WIDTH - _RIGHT, at, "#d65f5f", "4 3")]
    for name, values, color, place in (
        ("largest", peaks, "#4878cf", 0),
        ("mean", means, "#ee854a", 1),
        (f"tolerance {tolerance:g}", None, "#d65f5f", 2),
    ):
        if values is not None:
            points = " ".join(
                f"{_x(i + 0.5, len(values)):.1f},{y(float(v)):.1f}" for i, v in enumerate(values)
            )
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>'
            )
        left = _LEFT + 130 * place
        parts += [_line(left, 238, left + 20, 238, color), _text(left + 26, 242, name)]
    return parts


def _map(columns: np.ndarray, tolerance: float) -> list[str]:
    merged = _merge(_merge(np.nan_to_num(columns, nan=-1.0, posinf=np.inf), 0), 1)
    num_rows, num_columns = merged.shape
    title = "By token, a line a row: blue up to the tolerance (log scale), red beyond it"
    parts = [_text(_LEFT, _MAP_TOP - 10, title)]
    # One path per colour, in units of cells, keeps the file small.
    cells: dict[str, list[str]] = {}
    for (row, column), gap in np.ndenumerate(merged):
        if gap >= 0:
            cells.setdefault(_color(gap, tolerance), []).append(f"M{column} {row}h1v1h-1z")
    width, height = (_WIDTH - _LEFT - _RIGHT) / num_columns, _MAP_HEIGHT / num_rows
    place = f"translate({_LEFT} {_MAP_TOP}) scale({width:.4f} {height:.4f})"
    parts.append(f'<g transform="{place}" shape-rendering="crispEdges">')
    parts += [f'<path fill="{color}" d="{"".join(d)}"/>' for color, d in sorted(cells.items())]
    parts.append("</g>")
    bottom = _MAP_TOP + _MAP_HEIGHT
    parts += [_text(_LEFT - 6, _MAP_TOP + 10, "row 0", "end")]
    parts += [_text(_LEFT - 6, bottom, f"{columns.shape[0] - 1}", "end")]
    parts += [_text(_LEFT, bottom + 20, "position 0")]
    return [*parts, _text(_WIDTH - _RIGHT, bottom + 20, f"{columns.shape[1] - 1}", "end")]


def _merge(values: np.ndarray, axis: int) -> np.ndarray:
    size = values.shape[axis]
    if size <= _MAX_CELLS:
        return values
    starts = np.arange(_MAX_CELLS) * size // _MAX_CELLS
    return np.maximum.reduceat(values, starts, axis=axis)


def _color(gap: float, tolerance: float) -> str:
    if gap > tolerance:
        return "#c0392b"
    span = np.log10(tolerance) - np.log10(_FLOOR)
    level = (np.log10(max(gap, _FLOOR)) - np.log10(_FLOOR)) / max(span, 1e-9)
    level = round(level * _NUM_BLUES) / _NUM_BLUES
    red, green = (int(240 - 170 * level), int(244 - 130 * level))
    return f"#{red:02x}{green:02x}fa"


def _x(column: float, count: int) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * column / count


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    escaped = text.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escaped}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, color: str, dashes: str = "") -> str:
    dash = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"{dash}/>'
