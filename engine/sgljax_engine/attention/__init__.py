"""Attention: one file a backend."""
