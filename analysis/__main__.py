"""The entry point of `python -m analysis`."""

import sys

from analysis.cli.parser import main

if __name__ == "__main__":
    sys.exit(main())
