"""The entry point of `python -m cbengine`."""

import sys

from cbsim.errors import entry

if __name__ == "__main__":
    sys.exit(entry("cbengine.cli.parser"))
