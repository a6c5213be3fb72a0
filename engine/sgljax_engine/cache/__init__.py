"""Paged KV cache: page tables on the host, arrays on the device."""
