"""Compiles the device programs ahead of time, and counts them."""
