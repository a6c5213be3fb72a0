"""Shapes of the measured models."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sgljax_engine import ModelConfig, RopeConfig
from tunix_sgljax.cli.doctor_facts import example_model

PAD_ID = 0
_CONTEXT_LENGTH = 8192

SMALL = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=1536,
    num_layers=8,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    rope=RopeConfig(theta=1e6),
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    context_length=1024,
)
"""27 million parameters."""

SMALL_IN_WORDS = "Qwen3 of 8 layers, hidden 512, 8/4 heads of 64, MLP 1536"


class IdTokenizer:
    """Space-separated token ids as text; pad 0, no BOS, an end token that never comes."""

    def encode(self, text: str) -> list[int]:
        """Returns the ids in the text."""
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the ids as text."""
        return " ".join(str(int(token)) for token in ids)

    def bos_id(self) -> int:
        """Returns 0: no BOS."""
        return PAD_ID

    def eos_id(self) -> int:
        """Returns -1: no token ends a sequence."""
        return -1

    def pad_id(self) -> int:
        """Returns 0."""
        return PAD_ID


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchModel:
    """A model's shape; always float32, tied embeddings.

    Attributes:
        name: Name for results.
        config: The engine's ModelConfig.
        in_words: Description for reports.
    """

    name: str
    config: ModelConfig
    in_words: str


_TINY = dataclasses.replace(
    SMALL, vocab_size=1024, hidden_size=192, intermediate_size=576, num_layers=6, num_heads=4
)

QWEN3_0P6B = example_model()


def _model(name: str, config: ModelConfig, in_words: str) -> BenchModel:
    config = dataclasses.replace(config, context_length=_CONTEXT_LENGTH)
    vocabulary = f"vocabulary {config.vocab_size}, tied embeddings"
    return BenchModel(name=name, config=config, in_words=f"{in_words}, {vocabulary}")


MODELS = {
    model.name: model
    for model in (
        _model(
            "tiny",
            dataclasses.replace(_TINY, num_kv_heads=2),
            "Qwen3 of 6 layers, hidden 192, 4/2 heads of 64, MLP 576",
        ),
        _model("small", SMALL, SMALL_IN_WORDS),
        _model(
            "qwen3-0.6b",
            QWEN3_0P6B,
            "Qwen3-0.6B's true shape: 28 layers, hidden 1024, 16/8 heads of 128, MLP 3072",
        ),
    )
}
"""Models by name; 3, 27 and 596 million parameters."""
