"""How the engine stores a weight: the form that its products read fastest."""

from __future__ import annotations

import enum

import jax

from sgljax_engine.kernels.cpu.panels import PANEL, num_panels, pack, unpack


class Form(enum.Enum):
    """The physical form of a weight whose logical shape is [..., in, out]."""

    LOGICAL = "logical"
    TRANSPOSED = "transposed"
    """[..., out, in]."""

    PANELS = "panels"
    """[..., panels, in, 16], see `kernels.cpu.panels`."""

    TABLE_PANELS = "table_panels"
    """Likewise, of a table [out, in] whose rows are outputs."""

    @property
    def is_packed(self) -> bool:
        """Whether it has panels."""
        return self in (Form.PANELS, Form.TABLE_PANELS)

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The physical shape."""
        if self is Form.LOGICAL:
            return shape
        *stacked, rows, columns = shape
        if self is Form.TRANSPOSED:
            return (*stacked, columns, rows)
        num_inputs, num_outputs = (rows, columns) if self is Form.PANELS else (columns, rows)
        return (*stacked, num_panels(num_outputs), num_inputs, PANEL)

    def store(self, x: jax.Array) -> jax.Array:
        """A weight of the logical shape in this form. Traced by JAX."""
        if self is Form.LOGICAL:
            return x
        if self is Form.PANELS:
            return pack(x)
        transposed = x.swapaxes(-1, -2)
        return transposed if self is Form.TRANSPOSED else pack(transposed)

    def restore(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """The inverse of `store`, for a logical shape. Traced by JAX."""
        if self is Form.LOGICAL:
            return x
        if self is Form.TRANSPOSED:
            return x.swapaxes(-1, -2)
        if self is Form.PANELS:
            return unpack(x, shape[-1])
        return unpack(x, shape[-2]).swapaxes(-1, -2)
