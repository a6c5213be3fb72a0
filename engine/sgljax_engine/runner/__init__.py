"""From a scheduler's decision to device programs and back."""
