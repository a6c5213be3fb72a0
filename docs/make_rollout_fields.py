"""Writes the tables of docs/tunix.md from the code that reads RolloutConfig.

    python docs/make_rollout_fields.py

A test compares the file with `render()`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from sgljax_engine import FOREIGN_OPTIONS
from tunix_sgljax.rollout_config import vllm_sampling as sampling_fields
from tunix_sgljax.rollout_config.fields import (
    FIELDS,
    MODEL_FIELDS,
    SAMPLING_FIELDS,
    SGLANG_JAX_FIELDS,
    VLLM_FIELDS,
    RolloutField,
)

OUTPUT = Path(__file__).with_name("tunix.md")
_BEGIN, _END = (
    "<!-- fields: made by docs/make_rollout_fields.py -->\n",
    "<!-- end of fields -->\n",
)

_KINDS = {"accepted": "*accepted*: "}
"""What stands before the text of a field that sets nothing."""

_LATER = """Read from the training config when the rollout is made; a different value in another
config is refused. So the context length must cover evaluation; without one, the longest config of
the cluster decides."""

_ENTRIES = """What an entry of `rollout_vllm_kwargs` or `rollout_sglang_jax_kwargs` sets. As a
keyword of `SglJaxRollout` or `Engine` such a name is refused, and the error gives ours.
"""

_WITHOUT = """
{} more options of SGLang, vLLM and Tunix are known and have no counterpart; the warning, or the
error, says why.
"""

_SAMPLING_ENTRIES = """`rollout_vllm_sampling_kwargs` takes all fields of [Sampling](sampling.md).
`stop_token_ids` are added to the end tokens; `ignore_eos` leaves out the tokenizer's. A config
without entries uses the training config's.
"""


def render(text: str) -> str:
    """The text of docs/tunix.md with its tables regenerated."""
    head, _, rest = text.partition(_BEGIN)
    _, _, tail = rest.partition(_END)
    return head + _BEGIN + "\n" + "\n".join(_sections()) + "\n" + _END + tail


def _sections() -> Iterator[str]:
    yield from _fields("Sampling", "Read at every call.", SAMPLING_FIELDS)
    yield from _fields("Model and mesh", "", MODEL_FIELDS)
    yield from _fields("rollout_sglang_jax_...", _LATER, SGLANG_JAX_FIELDS)
    yield from _fields(
        "rollout_vllm_...", "Read like those above, `sampling_kwargs` at every call.", VLLM_FIELDS
    )
    yield "### Without a meaning\n"
    yield "| field | why |\n|---|---|"
    unread: dict[str, list[str]] = {}
    for field in FIELDS.values():
        if field.treatment == "named":
            unread.setdefault(field.text, []).append(f"`{field.name}`{_new(field)}")
    for text, names in unread.items():
        yield f"| {', '.join(names)} | {text} |"
    yield ""
    yield "### Names of engine options\n"
    yield _ENTRIES
    yield "| here | there |\n|---|---|"
    ours: dict[str, list[str]] = {}
    for option in FOREIGN_OPTIONS.values():
        if option.option is not None:
            opposite = "the opposite of " if option.is_opposite else ""
            note = f", {option.note}" if option.note else ""
            name = f"`{option.name}` ({option.engine})"
            ours.setdefault(f"{opposite}`{option.option}`{note}", []).append(name)
    for target, names in ours.items():
        yield f"| {target} | {', '.join(names)} |"
    yield _WITHOUT.format(sum(option.option is None for option in FOREIGN_OPTIONS.values()))
    yield "### vLLM's sampling fields\n"
    yield _SAMPLING_ENTRIES
    yield "| there | here |\n|---|---|"
    for name, target in sampling_fields.RENAMED.items():
        yield f"| `{name}` | `{target}` |"
    decides = "of RolloutConfig decides; another value is refused"
    same = [name for name, field in sampling_fields.DECIDED.items() if name == field]
    yield f"| {_codes(same)} | that field {decides} |"
    for field in dict.fromkeys(sampling_fields.DECIDED.values()):
        if field in same:
            continue
        names = [name for name, by in sampling_fields.DECIDED.items() if by == field]
        yield f"| {_codes(names)} | `{field}` {decides} |"
    yield "| `n` | 1; another value is refused |"
    yield f"| {_codes(list(sampling_fields.WITHOUT_MEANING))} | no effect; the warning says why |"


def _fields(title: str, intro: str, fields: Sequence[RolloutField]) -> Iterator[str]:
    yield f"### {title}\n"
    if intro:
        yield f"{intro}\n"
    yield "| field | here |\n|---|---|"
    for field in fields:
        if field.treatment == "named":
            continue
        parts = [f"`{field.target}`"] if field.target else []
        parts += [field.text] if field.text else []
        separator = " " if field.text.startswith(("of ", "instead ")) else "; "
        kind = _KINDS.get(field.treatment, "")
        yield f"| `{field.name}` | {kind}{separator.join(parts)}{_new(field)} |"
    yield ""


def _new(field: RolloutField) -> str:
    return " (new)" if field.is_new else ""


def _codes(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    OUTPUT.write_text(render(OUTPUT.read_text(encoding="utf-8")), encoding="utf-8")
