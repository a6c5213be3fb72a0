"""Checkpoints of Tunix and of LoRA runs."""
