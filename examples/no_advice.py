"""Imported first: transformers then does not advise to install PyTorch, which nothing here uses."""

import os

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
