"""Turns a scheduler's decision into device programs, and reads the results back."""
