"""Pallas kernels for TPUs, compiled by Mosaic."""
