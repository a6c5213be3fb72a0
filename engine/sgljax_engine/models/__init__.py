"""Model architectures: parameter specifications and forward functions."""
