"""Sampling: parameters to arrays on the host, and draws on the device."""
