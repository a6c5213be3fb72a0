"""The command `tunix-sgljax`: train, generate, bench, doctor, convert."""
