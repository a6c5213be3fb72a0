"""Attention: one file per backend."""
