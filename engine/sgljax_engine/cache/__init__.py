"""Paged KV cache: the host's page book-keeping and the device's arrays."""
