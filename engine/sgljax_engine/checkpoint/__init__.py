"""Checkpoints of an engine's requests: their parts, and a manager that keeps one in a folder.

Host-only; no JAX. The engine decides what goes in and what to do with what comes out.
"""
