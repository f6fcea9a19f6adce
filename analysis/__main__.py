"""The entry point of `python -m analysis`."""

import sys

from cbsim.errors import entry

if __name__ == "__main__":
    sys.exit(entry("analysis.cli.parser"))
