"""Exactness of log-probs: reports, and the trainer's own bits."""
