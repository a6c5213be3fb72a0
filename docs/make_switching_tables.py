"""Writes the tables of docs/switching.md from the code that reads RolloutConfig.

    python docs/make_switching_tables.py

A test compares the file with `render()`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from sgljax_engine import FOREIGN_OPTIONS
from tunix_sgljax.rollout_config import vllm_sampling as sampling_fields
from tunix_sgljax.rollout_config.fields import (
    MODEL_FIELDS,
    SAMPLING_FIELDS,
    SGLANG_JAX_FIELDS,
    VLLM_FIELDS,
    RolloutField,
)

OUTPUT = Path(__file__).with_name("switching.md")
_BEGIN, _END = (
    "<!-- fields: made by docs/make_switching_tables.py -->\n",
    "<!-- end of fields -->\n",
)

_LATER = """Read from the training config when the rollout is made. A later config, such as an
evaluation config, may leave them at their defaults or repeat them; a different value is refused.
Without a context length the longest config of the cluster decides, evaluation's included; a config
that a given one is too short for is refused when the cluster is made."""

_ENTRIES = """The option that each entry of `rollout_vllm_kwargs` or `rollout_sglang_jax_kwargs`
sets. As a keyword of `SglJaxRollout` or `Engine` such a name is refused, and the error gives its
name here.
"""

_SAMPLING_ENTRIES = """The field that each entry of `rollout_vllm_sampling_kwargs` sets. All fields
of [Sampling](sampling.md) are accepted. Those refused there, and unknown ones, are refused here
too, since ignoring them would change the sampled tokens. `stop_token_ids` are added to the end
tokens; `ignore_eos` leaves out the tokenizer's. A config without entries uses those of the training
config.
"""


def render(text: str) -> str:
    """The text of docs/switching.md with its tables regenerated."""
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
    yield "### Names of engine options\n"
    yield _ENTRIES
    yield "| there | here |\n|---|---|"
    for option in FOREIGN_OPTIONS.values():
        if option.option is not None:
            opposite = "the opposite of " if option.is_opposite else ""
            note = f", {option.note}" if option.note else ""
            yield f"| `{option.name}` ({option.engine}) | {opposite}`{option.option}`{note} |"
    yield "\nThese have no counterpart, so the warning names them:\n\n| there | why |\n|---|---|"
    for note in dict.fromkeys(o.note for o in FOREIGN_OPTIONS.values() if o.option is None):
        names = [o.name for o in FOREIGN_OPTIONS.values() if o.option is None and o.note == note]
        yield f"| {_codes(names)} | {note} |"
    yield "\n### vLLM's sampling fields\n"
    yield _SAMPLING_ENTRIES
    yield "| there | here |\n|---|---|"
    for name, target in sampling_fields.RENAMED.items():
        yield f"| `{name}` | `{target}` |"
    for name, field in sampling_fields.DECIDED.items():
        yield f"| `{name}` | `{field}` of RolloutConfig decides; another value is refused |"
    yield "| `n` | 1; another value is refused |"
    for name, reason in sampling_fields.WITHOUT_MEANING.items():
        yield f"| `{name}` | no effect, as a warning says: {reason} |"


def _fields(title: str, intro: str, fields: Sequence[RolloutField]) -> Iterator[str]:
    yield f"### {title}\n"
    if intro:
        yield f"{intro}\n"
    yield "| field | | here |\n|---|---|---|"
    for field in fields:
        parts = [f"`{field.target}`"] if field.target else []
        parts += [field.text] if field.text else []
        separator = " " if field.text.startswith(("of ", "instead ")) else "; "
        new = " (Tunix's main branch)" if field.is_new else ""
        yield f"| `{field.name}` | {field.treatment} | {separator.join(parts)}{new} |"
    yield ""


def _codes(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    OUTPUT.write_text(render(OUTPUT.read_text(encoding="utf-8")), encoding="utf-8")
