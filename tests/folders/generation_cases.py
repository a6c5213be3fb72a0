"""Contents of generation_config.json files by generation, and a distribution to see them by."""

from __future__ import annotations

import random
from typing import Any

VOCAB_SIZE = 16
PROMPT = (1, 2, 3, 4)
OUTPUTS = ((), (5, 6, 6))
"""Two moments at which the next token's distribution is looked at."""

_NOISE = random.Random(5)
LOGITS = tuple(_NOISE.gauss(0.0, 2.0) for _ in range(VOCAB_SIZE))
END = (0, 7)

NUM_HONOURED = 200
NUM_OTHER = 100

_HONOURED: dict[str, tuple[Any, ...]] = {
    "temperature": (0.3, 0.6, 1.0, 1, 1.5),
    "top_k": (0, 1, 3, 20, 500),
    "top_p": (0, 0.0, 0.1, 0.5, 0.95, 1.0, 1),
    "min_p": (0.0, 0.05, 0.4),
    "repetition_penalty": (1.0, 1.1, 1.5, 0.8),
    "min_new_tokens": (0, 1, 2, 4),
    "suppress_tokens": ([], [9], [3, 5, 11]),
    "bad_words_ids": ([[2]], [[0], [4]], [[7], [12], [13]]),
    "sequence_bias": ([[[4], 3.0]], [[[8], -2.5], [[1], 1.0]]),
    # Without any effect.
    "num_beams": (1,),
    "typical_p": (1.0,),
    "no_repeat_ngram_size": (0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "length_penalty": (1.0, 0.5),
    "renormalize_logits": (True, False),
    "begin_suppress_tokens": (None,),
    "guidance_scale": (None, 1),
    "use_cache": (True, False),
    "cache_implementation": ("hybrid",),
    "pad_token_id": (0,),
    "transformers_version": ("4.40.1",),
    "max_length": (4096,),
}

OTHER: dict[str, tuple[Any, ...]] = {
    # Unusable values.
    "temperature": (-1.0, "0.7", True, [1], 1e9),
    "top_k": (-5, 2.5, "20", True),
    "top_p": (-0.1, 1.5, "0.9", [0.9]),
    "min_p": (-0.1, 2.0, "x"),
    "repetition_penalty": (0, -1.0, 1000.0, "1.1"),
    "max_new_tokens": (-1, 2.5, "many"),
    "min_new_tokens": (-1, 0.5, "few"),
    "suppress_tokens": ("9", 9, [99], [[3]], [-1], [True]),
    "bad_words_ids": ([3], [[2, 3]], [["a"]], "bad"),
    "sequence_bias": ({"3": 1.0}, [[[3, 4], 1.0]], [[[3], 1000.0]], [[[99], 1.0]], [3]),
    "stop_strings": ("", [""], 5, [3], ["x" * 2000]),
    # Fields without a counterpart.
    "num_beams": (2,),
    "no_repeat_ngram_size": (2,),
    "typical_p": (0.4,),
    "epsilon_cutoff": (0.1,),
    "eta_cutoff": (0.1,),
    "top_h": (0.3,),
    "min_length": (6,),
    "max_length": (20,),
    "begin_suppress_tokens": ([3],),
    "forced_bos_token_id": (3,),
    "forced_eos_token_id": (7,),
    "exponential_decay_length_penalty": ([2, 1.5],),
    "encoder_repetition_penalty": (1.3,),
    "encoder_no_repeat_ngram_size": (2,),
    "guidance_scale": (1.5,),
    "penalty_alpha": (0.6,),
    "dola_layers": ("low",),
    "num_return_sequences": (3,),
    "watermarking_config": ({"bias": 2.0},),
    "remove_invalid_values": (True,),
    "token_healing": (True,),
    "max_time": (1.0,),
    "force_words_ids": ([[3]],),
    "constraints": (["x"],),
    "chat_format": ("chatml",),
}


def honoured() -> list[dict[str, Any]]:
    """Files of which every field is honoured or asks for nothing; all sample."""
    rng = random.Random(57)
    return [
        {"do_sample": True, "eos_token_id": list(END)}
        | {name: rng.choice(_HONOURED[name]) for name in _names(rng, _HONOURED, 6)}
        for _ in range(NUM_HONOURED)
    ]


def others() -> list[tuple[dict[str, Any], tuple[str, ...]]]:
    """Files like those, with fields that cannot be honoured, and the names of these."""
    rng = random.Random(58)
    files = []
    for contents in honoured()[:NUM_OTHER]:
        names = _names(rng, OTHER, 3)
        wrong = {name: rng.choice(OTHER[name]) for name in names}
        files.append((contents | wrong, tuple(wrong)))
    return files


def _names(rng: random.Random, pool: dict[str, Any], most: int) -> list[str]:
    return rng.sample(list(pool), rng.randint(1, most))
