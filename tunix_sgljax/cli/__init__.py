"""The command `tunix-sgljax`: train, generate, doctor, convert."""
