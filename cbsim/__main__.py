"""`python -m cbsim`."""

import gc
import sys

from cbsim.cli.parser import main

status = main()
gc.freeze()  # at its end Python looks through all there is for cycles, which takes a tenth of a second
sys.exit(status)
