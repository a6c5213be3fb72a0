"""Checks of configuration values; each error names the field, its value and the limit."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from pathlib import Path

from sgljax_engine.errors import InvalidConfigError, InvalidRequestError


def require(ok: bool, name: str, value: object, limit: str) -> None:
    if not ok:
        raise InvalidConfigError(f"{name} must be {limit}, got {value!r}")


def check_model_folder(option: str, path: str | Path) -> Path:
    """The folder of a Hugging Face model, whatever it holds.

    Args:
        option: The option that names it, for messages.
        path: The folder.

    Raises:
        InvalidConfigError: for what is no folder; with how to fetch a model of a hub.
    """
    folder = Path(path)
    if not folder.exists():
        parts = folder.parts[-2:]
        is_name = len(parts) == 2 and not folder.parent.exists()  # else its author mistyped a path
        target = folder if folder.is_absolute() or not is_name else parts[-1]
        raise InvalidConfigError(
            f"{option} must be a folder, and there is no {str(folder)!r}; models are not "
            f"downloaded: `hf download {'/'.join(parts) if is_name else 'OWNER/NAME'} --local-dir "
            f"{target}` fetches one of Hugging Face's hub"
        )
    require(folder.is_dir(), option, str(folder), "a folder")
    return folder


def is_int(value: object) -> bool:
    """Whether a value is an integer but not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_count(name: str, value: object, low: int = 1) -> None:
    require(is_int(value) and value >= low, name, value, f"an integer >= {low}")  # type: ignore[operator]


def check_names(name: str, value: object, known: Sequence[str], limit: str) -> tuple[str, ...]:
    """A list of known names as a tuple, each once; raises InvalidConfigError unless it is one."""
    is_list = isinstance(value, (list, tuple)) and len(value) > 0
    require(is_list and all(each in known for each in value), name, value, limit)  # type: ignore[union-attr]
    return tuple(dict.fromkeys(value))  # type: ignore[arg-type]


def check_positive(name: str, value: float) -> None:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    require(is_number and math.isfinite(value) and value > 0, name, value, "a positive number")


def check_text(text: str, name: str = "the text") -> None:
    """Refuses a lone surrogate, which no tokenizer can encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{name} must be text without lone surrogates, got {text[error.start]!r} at position "
            f"{error.start}"
        ) from None
