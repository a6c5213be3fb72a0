"""Builds engines."""
