"""Continuous batching: which requests run next, on which pages. Imports no JAX."""
