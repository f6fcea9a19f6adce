"""`python -m cbsim`."""

import sys

from cbsim.cli import main

sys.exit(main())
