"""Which layers MaxText's decoders have, and where their weights are.

A scanned decoder stacks the weights of equal layers on further axes of one array.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tunix_sgljax.maxtext.fields import HYBRIDS, get

_CYCLES = {"gemma2": 2, "gemma3": 6, "gemma4": 6, "gemma4_small": 6, "gpt_oss": 2, "olmo3": 4}
"""Layers of a cycle, by decoder block: sliding ones, then one with full attention."""

_GEMMA4_E2B_CYCLE = 5


class Place(NamedTuple):
    """Where a layer's weights are: in a dotted module of a `TunixMaxTextAdapter`.

    `suffix` is that of the first component of a weight's name there; `part` are indices of the
    layer on the stacked axes `part_axes` of each weight, none for a layer of its own.
    """

    module: str
    suffix: str = ""
    part: tuple[int, ...] = ()
    part_axes: tuple[int, ...] = ()

    def name(self, weight: str) -> str:
        first, dot, rest = weight.partition(".")
        return f"{self.module}.{first}{self.suffix}{dot}{rest}"


def num_layers(config: Any) -> int:
    """Decoder layers, of which MaxText's Gemma 2 counts pairs."""
    count = get(config, "num_decoder_layers")
    return 2 * count if get(config, "decoder_block") == "gemma2" else count


def net_layers(config: Any) -> tuple[bool, ...]:
    """Whether each layer of a hybrid is a gated delta net; the last of a cycle has attention."""
    cycle = get(config, "inhomogeneous_layer_cycle_interval")
    return tuple((layer + 1) % cycle != 0 for layer in range(num_layers(config)))


def sliding_layers(config: Any) -> tuple[bool, ...]:
    """Whether each layer's attention has the sliding window; empty when none has."""
    cycle = cycle_length(config)
    if cycle == 1:
        return ()
    return tuple(layer % cycle != cycle - 1 for layer in range(num_layers(config)))


def cycle_length(config: Any) -> int:
    """Every so many layers one has full attention."""
    block = get(config, "decoder_block")
    if block == "gemma4_small" and get(config, "model_name") == "gemma4-e2b":
        return _GEMMA4_E2B_CYCLE
    return _CYCLES.get(block, 1)


def places(config: Any) -> list[Place]:
    """Where the weights of each decoder layer are, in the order of the layers."""
    block, decoder = get(config, "decoder_block"), "base.decoder"
    is_scanned, axis = get(config, "scan_layers"), get(config, "param_scan_axis")
    count = num_layers(config)
    if block == "gemma2":
        return [
            place._replace(suffix=suffix)
            for place in _plain_places(decoder, is_scanned, axis, count // 2)
            for suffix in ("_local", "_global")
        ]
    if block == "deepseek":
        num_dense = get(config, "first_num_dense_layers")
        kinds = {"dense_layers": num_dense, "moe_layers": count - num_dense}
        return [
            place
            for kind, number in kinds.items()
            for place in _plain_places(decoder, is_scanned, axis, number, kind)
        ]
    if not is_scanned or block not in ("gemma3", "gemma4", "gpt_oss", "olmo3", *HYBRIDS):
        return _plain_places(decoder, is_scanned, axis, count)
    layers = range(count)
    if block == "gemma4":
        blocks, cycle = f"{decoder}.scanned_blocks", cycle_length(config)
        return [_nested_place(decoder, blocks, axis, layer, count, cycle) for layer in layers]
    if block not in HYBRIDS:
        cycle = cycle_length(config)
        return [_cycle_place(decoder, axis, layer, count, cycle) for layer in layers]
    blocks, cycle = f"{decoder}.layers", get(config, "inhomogeneous_layer_cycle_interval")
    if block == "qwen3_next":
        return [_nested_place(decoder, blocks, axis, layer, count, cycle) for layer in layers]
    return [
        Place(f"{blocks}.layer_{layer % cycle}", "", (layer // cycle,), (axis,)) for layer in layers
    ]


def _plain_places(
    decoder: str, is_scanned: bool, axis: int, count: int, name: str = "layers"
) -> list[Place]:
    if is_scanned:
        return [Place(f"{decoder}.{name}", "", (layer,), (axis,)) for layer in range(count)]
    return [Place(f"{decoder}.{name}_{layer}") for layer in range(count)]


def _cycle_place(decoder: str, axis: int, layer: int, count: int, length: int) -> Place:
    """A stack for each layer of the cycle, over whole cycles; the rest are on their own."""
    cycle, index = divmod(layer, length)
    if cycle < count // length:
        return Place(f"{decoder}.layers.layers_{index}", "", (cycle,), (axis,))
    return Place(f"{decoder}.layers_remainder.layers_{index}")


def _nested_place(
    decoder: str, blocks: str, axis: int, layer: int, count: int, length: int
) -> Place:
    """A stack of a cycle's layers before its last, in a stack over whole cycles of that length."""
    cycle, index = divmod(layer, length)
    if cycle == count // length:
        return Place(f"{decoder}.layers_remainder.local_layers", "", (index,), (axis,))
    if index == length - 1:
        return Place(f"{blocks}.global_layer", "", (cycle,), (axis,))
    return Place(f"{blocks}.local_layers", "", (cycle, index), (axis, axis + 1))
