"""Checkpoints of an engine: typed, versioned structures, and a manager that keeps them on disk.

Host-only; no JAX. The engine decides what goes in and what to do with what comes out.
"""
