"""Weights that change while episodes are in flight: learners, clusters, versions of tokens."""
