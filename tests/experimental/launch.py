"""Tunix's launcher, with the generated modules of its discovery service in another folder.

python tests/experimental/launch.py FOLDER --process_main=...
"""

import sys

if __name__ == "__main__":
    from tunix.experimental.distributed.runtime import (
        discovery,  # pyright: ignore
        main,  # pyright: ignore
    )

    discovery.__path__.append(sys.argv.pop(1))
    main.main(sys.argv)
