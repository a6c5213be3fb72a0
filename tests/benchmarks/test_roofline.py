"""The arithmetic of the limit, against numbers worked out by hand."""

import dataclasses

import pytest

from benchmarks.hardware import roofline
from benchmarks.hardware.ceilings import Ceilings, measure_ceilings
from benchmarks.lib.workloads import Workload
from sgljax_engine import ModelConfig, RopeConfig

CONFIG = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=10,
    hidden_size=4,
    intermediate_size=6,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=2,
    rope=RopeConfig(theta=1e6),
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    context_length=64,
)
# A layer: q and o 4x4 each, k and v 4x2 each, gate, up and down 4x6 each.
PROJECTIONS = 2 * (2 * 16 + 2 * 8 + 3 * 24)
TABLE = 10 * 4
CEILINGS = Ceilings(
    flops_per_s=1000.0, read_bytes_per_s=100.0, copy_bytes_per_s=50.0, probes={"matmul": 1000.0}
)


def workload(prompt_lens=(3,), lengths=(2, 4), num_rows=2):
    return Workload(
        name="test",
        prompts=tuple((1,) * length for length in prompt_lens),
        num_samples=len(lengths) // len(prompt_lens),
        output_lengths=lengths,
        num_rows=num_rows,
    )


def by_part(work):
    total: dict[str, tuple[float, float]] = {}
    for entry in work:
        flops, num_bytes = total.get(entry.part, (0.0, 0.0))
        total[entry.part] = (flops + entry.flops, num_bytes + entry.num_bytes)
    return total


def test_sizes_of_the_models():
    assert roofline.projection_params(CONFIG) == PROJECTIONS == 240
    assert roofline.weight_bytes(CONFIG) == (240 + 40) * 4


def test_a_decode_step():
    work = by_part(roofline.decode_work(CONFIG, num_tokens=3, num_keys=7, num_passes=1))
    assert work == {
        "projections": (2 * 240 * 3, 240 * 4),
        # Each key: 2 layers x 2 heads x head_dim 2, twice for scores and values, 2 FLOPs each.
        "attention": (4 * 2 * 2 * 2 * 7, 7 * 2 * 2 * 1 * 2 * 4),
        "logits": (2 * 40 * 3, 40 * 4),
        "sampling": (0, 3 * 10 * 4),
    }


def test_useful_work_of_a_group():
    # A prompt of 3 tokens, 2 samples of 2 and 4 tokens: 1 + 3 tokens are fed back.
    assert by_part(roofline.useful_work(CONFIG, workload())) == {
        "prefill projections": (2 * 240 * 3, 240 * 4),
        "prefill attention": (4 * 8 * (1 + 2 + 3), 3 * 32),
        # They see 4; 4, 5 and 6 keys. At least 3 steps, since the longer one takes 3.
        "projections": (2 * 240 * 4, 3 * 240 * 4),
        "attention": (4 * 8 * 19, 19 * 32),
        "logits": (2 * 40 * (1 + 4), 40 * 4 * (1 + 3)),
        "sampling": (0, (1 + 4) * 10 * 4),
    }


@pytest.mark.parametrize(
    ("lengths", "num_rows", "expected"),
    [((2, 4), 2, 3), ((5, 5, 5, 5), 2, 8), ((5, 5, 5, 5), 3, 6), ((1,), 1, 0)],
)
def test_fewest_decode_steps(lengths, num_rows, expected):
    prompt_lens = (3,) * (len(lengths) // 2 or 1)
    assert roofline.min_decode_steps(workload(prompt_lens, lengths, num_rows)) == expected


def test_a_part_takes_the_longer_of_flops_and_bytes():
    by_flops = roofline.PartWork(part="a", flops=2000.0, num_bytes=100.0)
    by_bytes = roofline.PartWork(part="a", flops=500.0, num_bytes=300.0)
    assert by_flops.limit_s(CEILINGS) == 2.0
    assert by_bytes.limit_s(CEILINGS) == 3.0
    other = dataclasses.replace(by_bytes, part="b")
    assert roofline.limit_by_part([by_flops, by_bytes, other], CEILINGS) == {"a": 5.0, "b": 3.0}


@pytest.mark.soak
def test_ceilings_are_the_best_of_their_probes():
    ceilings = measure_ceilings(1 << 20, seconds=0.0)
    for field, kind in (
        ("flops_per_s", "matmul"),
        ("read_bytes_per_s", "read"),
        ("copy_bytes_per_s", "copy"),
    ):
        values = [value for name, value in ceilings.probes.items() if name.startswith(kind)]
        assert len(values) >= 2
        assert getattr(ceilings, field) == max(values) > 1e6


def test_bytes_of_a_decode_step():
    # Prompts of 3, outputs of 2 and 4 tokens: 3 steps at least, in which one row sees 4 keys and
    # the other 4, 5 and 6.
    keys = 4 + 4 + 5 + 6
    per_key = 2 * CONFIG.num_layers * CONFIG.num_kv_heads * CONFIG.head_dim * 4
    expected = (PROJECTIONS + TABLE) * 4 + keys * per_key / 3
    assert roofline.decode_step_bytes(CONFIG, workload()) == round(expected)
