"""The entry point of `python -m cbengine`."""

import sys

from cbengine.cli.parser import main

if __name__ == "__main__":
    sys.exit(main())
