"""How exact log-probs are: reports, and the trainer's own bits."""
