"""Sampling: arrays of parameters on the host, and draws on the device."""
