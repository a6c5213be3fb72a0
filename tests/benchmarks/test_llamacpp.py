"""The comparison with llama.cpp, without llama.cpp: its batcher, its file and the arithmetic."""

from __future__ import annotations

import dataclasses
import struct
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from benchmarks.lib.gguf_model import encode, gguf_name, write_gguf
from benchmarks.lib.llamacpp_peer import Batcher, Settings
from benchmarks.lib.llamacpp_sides import Worker, make_weights
from benchmarks.lib.shapes import MODELS
from benchmarks.throughput import llamacpp

VOCAB = 50


def next_token(tokens):
    return (sum((i + 1) * token for i, token in enumerate(tokens)) * 7 + len(tokens)) % VOCAB


class TokenContext:
    """A context whose cache is the tokens themselves; the next one depends on all of them."""

    def __init__(self, settings):
        self.settings = settings
        self.sequences = [[] for _ in range(settings.num_slots)]
        self.num_tokens = 0

    def decode(self, tokens, positions, sequences, wanted):
        assert 0 < len(tokens) <= self.settings.batch_tokens
        self.num_tokens += len(tokens)
        logits = []
        for token, position, row, is_wanted in zip(
            tokens, positions, sequences, wanted, strict=True
        ):
            assert position == len(self.sequences[row])
            self.sequences[row].append(int(token))
            if is_wanted:
                logits.append(np.eye(VOCAB)[next_token(self.sequences[row])])
        return np.array(logits).reshape(-1, VOCAB)

    def clear(self):
        self.sequences = [[] for _ in self.sequences]

    def truncate(self, sequence, num_positions):
        del self.sequences[sequence][num_positions:]

    def copy(self, source, target, num_positions):
        self.sequences[target] = self.sequences[source][:num_positions]


def greedy(prompt, length):
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("num_slots", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("batch_tokens", [16, 64])
def test_the_batcher_answers_like_one_request_at_a_time(num_slots, batch_tokens):
    rng = np.random.default_rng(num_slots)
    prompts = [rng.integers(VOCAB, size=rng.integers(1, 20)).tolist() for _ in range(4)]
    requests = [prompts[i] for i in (0, 0, 0, 1, 1, 2, 0, 3, 3, 3, 2, 1)]
    lengths = [int(length) for length in rng.integers(1, 9, len(requests))]
    context = TokenContext(Settings(num_slots=num_slots, batch_tokens=batch_tokens))
    batcher = Batcher(context)
    expected = [greedy(*request) for request in zip(requests, lengths, strict=True)]
    assert batcher.generate(requests, lengths) == expected
    assert batcher.generate(requests, lengths) == expected


def test_a_group_is_prefilled_once():
    context = TokenContext(Settings(num_slots=8))
    Batcher(context).generate([[1] * 100] * 8, [3] * 8)
    assert context.num_tokens == 100 + 2 * 8


class Reader:
    """Reads the parts of a GGUF file."""

    def __init__(self, data: bytes) -> None:
        self.data, self.offset = data, 0

    def read(self, layout) -> Any:
        values = list(struct.unpack_from(f"<{layout}", self.data, self.offset))
        self.offset += struct.calcsize(f"<{layout}")
        return values if len(values) > 1 else values[0]

    def string(self):
        return self.read(f"{self.read('Q')}s").decode()

    def value(self):
        kind = self.read("I")
        return self.string() if kind == 8 else self.read({4: "I", 6: "f"}[kind])


def test_a_file_holds_the_weights_transposed(tmp_path):
    config = MODELS["tiny"].config
    weights = make_weights(config).arrays
    path = tmp_path / "model.gguf"
    write_gguf(path, config, weights)
    reader = Reader(path.read_bytes())
    magic, version, num_tensors, num_facts = reader.read("4sIQQ")
    assert (magic, version, num_tensors) == (b"GGUF", 3, len(weights))
    facts = {reader.string(): reader.value() for _ in range(num_facts)}
    assert facts["general.architecture"] == "qwen3"
    assert facts["qwen3.attention.head_count_kv"] == config.num_kv_heads
    tensors = {}
    for _ in range(num_tensors):
        name, num_dims = reader.string(), reader.read("I")
        tensors[name] = [reader.read("Q") for _ in range(num_dims)], *reader.read("IQ")
    start = -(-reader.offset // 32) * 32
    for name, weight in weights.items():
        shape, kind, offset = tensors[gguf_name(name)]
        stored = np.frombuffer(reader.data, np.float32, weight.size, start + offset)
        logical = stored.reshape(shape[::-1])
        assert kind == 0
        np.testing.assert_array_equal(logical.T if "_proj" in name else logical, weight)


def test_other_weights_and_models_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no weight of Qwen3: 'model\.layers\.0\.mlp\.router"):
        gguf_name("model.layers.0.mlp.router.weight")
    config = dataclasses.replace(MODELS["tiny"].config, architecture="LlamaForCausalLM")
    with pytest.raises(ValueError, match="'LlamaForCausalLM'"):
        write_gguf(tmp_path / "model.gguf", config, {})


def test_small_types_are_near_the_numbers():
    array = np.random.default_rng(0).standard_normal((3, 64), np.float32)
    array[0, :32] = 0
    halves = np.frombuffer(encode(array, "BF16"), ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_allclose(halves.reshape(array.shape), array, rtol=2**-8)
    layout = np.dtype([("factor", np.float16), ("values", np.int8, (32,))])
    blocks = np.frombuffer(encode(array, "Q8_0"), layout)
    restored = blocks["values"] * blocks["factor"].astype(np.float32)[:, None]
    np.testing.assert_allclose(restored.reshape(array.shape), array, atol=np.abs(array).max() / 200)


def test_tokens_are_compared_up_to_the_first_difference():
    assert llamacpp.agreed_tokens([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 0, 6]]) == (4, 5)


def test_a_worker_answers_and_reports_errors():
    code = (
        "from benchmarks.lib.llamacpp_peer import serve\n"
        "def echo(value):\n"
        "    print('not an answer')\n"
        "    return {'value': 1 // value}\n"
        "serve({'echo': echo})\n"
    )
    worker = Worker([sys.executable, "-c", code])
    try:
        assert worker.call("echo", value=1) == {"value": 1}
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            worker.call("echo", value=0)
        assert worker.call("echo", value=1) == {"value": 1}
    finally:
        worker.close()


def test_without_llama_cpp_it_says_so(capsys):
    llamacpp.main(["--quick", "--peer-python", "no_such_python"])
    assert "no comparison with llama.cpp: no_such_python does not run" in capsys.readouterr().out
