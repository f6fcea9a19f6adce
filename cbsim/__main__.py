"""The entry point of `python -m cbsim`."""

import gc
import sys

from cbsim.errors import entry

gc.set_threshold(500_000)  # a start leaves hundreds of thousands of objects, which would be searched time and again
status = entry("cbsim.cli.parser")
gc.freeze()  # at exit Python searches all objects for cycles, which takes a tenth of a second
sys.exit(status)
