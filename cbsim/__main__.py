"""The entry point of `python -m cbsim`."""

import gc
import sys

from cbsim.errors import entry

status = entry("cbsim.cli.parser")
gc.freeze()  # at exit Python searches all objects for cycles, which takes a tenth of a second
sys.exit(status)
