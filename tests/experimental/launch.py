"""Tunix's launcher, with the generated modules of its discovery service in another folder.

python tests/experimental/launch.py FOLDER --process_main=...
"""

import importlib
import sys

if __name__ == "__main__":
    runtime = "tunix.experimental.distributed.runtime"
    importlib.import_module(f"{runtime}.discovery").__path__.append(sys.argv.pop(1))
    importlib.import_module(f"{runtime}.main").main(sys.argv)
