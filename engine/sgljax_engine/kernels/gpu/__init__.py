"""Pallas kernels for GPUs, compiled by Triton. They import nothing else of ours."""
