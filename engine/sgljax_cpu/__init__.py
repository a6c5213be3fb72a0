"""JIT-compiled CPU kernels, where XLA's code is slow.

Kernels are written in LLVM IR (`emit`). llvmlite, a dependency of Tunix, compiles them for the
vectors of this processor (`machine`). An `operation` is a JAX primitive. Neighbouring ones are
joined (`fusion`) into a `chain`, which programs call as one XLA foreign function: its memory layout
is checked (`abi`), and it runs on XLA's own threads (`threads`). Where any of this is missing,
`unavailable` says why, and engines use XLA's own code.

Weights are in panels of 16 outputs (`panels`), activations token-major. Every kernel adds in one
order, whatever the number of tokens: a token has the same bits in any batch.

What is exported here is all that an engine uses; the package imports nothing of the engine.
"""

from sgljax_cpu.attention import paged_attention, write_kv
from sgljax_cpu.attention_tile import AttentionShape
from sgljax_cpu.chain import unavailable
from sgljax_cpu.copy import copy
from sgljax_cpu.delta_net import delta_rule, net_heads
from sgljax_cpu.embed import embed
from sgljax_cpu.fusion import fuse
from sgljax_cpu.linear import linear
from sgljax_cpu.longest_match import longest_match
from sgljax_cpu.machine import host_vectors
from sgljax_cpu.norm import rms_norm
from sgljax_cpu.pack import pack
from sgljax_cpu.panels import PANEL, Panels, num_panels
from sgljax_cpu.panels import pack as pack_panels
from sgljax_cpu.panels import unpack as unpack_panels
from sgljax_cpu.ragged_linear import ragged_linear
from sgljax_cpu.rope import rope_tables, rotate
from sgljax_cpu.sampling import draw, find_peaks, logprobs, sum_weights
from sgljax_cpu.sampling_threshold import top_threshold

__all__ = [
    "PANEL",
    "AttentionShape",
    "Panels",
    "copy",
    "delta_rule",
    "draw",
    "embed",
    "find_peaks",
    "fuse",
    "host_vectors",
    "linear",
    "logprobs",
    "longest_match",
    "net_heads",
    "num_panels",
    "pack",
    "pack_panels",
    "paged_attention",
    "ragged_linear",
    "rms_norm",
    "rope_tables",
    "rotate",
    "sum_weights",
    "top_threshold",
    "unavailable",
    "unpack_panels",
    "write_kv",
]
