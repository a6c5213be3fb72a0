"""Measures rollout speed: workloads, models with random weights, and peers."""
