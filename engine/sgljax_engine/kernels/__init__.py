"""Kernels by what they run on. They import nothing else of the engine."""
