"""Continuous batching: chooses the requests that run next, and their pages. Imports no JAX."""
