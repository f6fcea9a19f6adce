"""`python -m cbsim`."""

import sys

from cbsim.cli.parser import main

sys.exit(main())
