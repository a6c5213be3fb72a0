"""The comparison with llama.cpp, without llama.cpp: its batcher, its file and the arithmetic."""

from __future__ import annotations

import dataclasses
import sys

import gguf
import numpy as np
import pytest

from benchmarks.lib.gguf_model import STORED_TYPES, write_gguf
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


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 0), ("bfloat16", 2**-8), ("int8", 1 / 200)]
)
def test_a_file_holds_the_weights_transposed(tmp_path, dtype, tolerance):
    config = MODELS["tiny"].config
    weights = make_weights(config).arrays
    path = tmp_path / "model.gguf"
    write_gguf(path, config, weights, dtype)
    reader = gguf.GGUFReader(path)
    assert reader.fields["general.architecture"].contents() == "qwen3"
    assert reader.fields["qwen3.attention.head_count_kv"].contents() == config.num_kv_heads
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert len(tensors) == len(weights)
    projection = tensors["blk.0.attn_q.weight"]
    assert projection.tensor_type == STORED_TYPES[dtype]
    expected = weights["model.layers.0.self_attn.q_proj.weight"].T
    found = gguf.dequantize(projection.data, projection.tensor_type)
    np.testing.assert_allclose(found, expected, atol=tolerance * np.abs(expected).max())
    norm = tensors["blk.5.ffn_norm.weight"]
    np.testing.assert_array_equal(
        norm.data, weights["model.layers.5.post_attention_layernorm.weight"]
    )


def test_other_weights_and_models_are_refused(tmp_path):
    config, path = MODELS["tiny"].config, tmp_path / "model.gguf"
    name = "model.layers.0.mlp.router.weight"
    with pytest.raises(ValueError, match=r"no weight of Qwen3: 'model\.layers\.0\.mlp\.router"):
        write_gguf(path, config, {name: np.ones(4, np.float32)})
    config = dataclasses.replace(config, architecture="LlamaForCausalLM")
    with pytest.raises(ValueError, match="'LlamaForCausalLM'"):
        write_gguf(path, config, {})


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
