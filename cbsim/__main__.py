"""The entry point of `python -m cbsim`, and of the command `cbsim`."""

import gc
import os
import sys

from cbsim.errors import entry


def main() -> int:
    """Run the command line. A start leaves hundreds of thousands of objects, which would be searched for cycles time
    and again, and at exit; and numpy's threads would spin for a while on every core.
    """
    gc.set_threshold(500_000)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    status = entry("cbsim.cli.parser")
    gc.freeze()
    return status


if __name__ == "__main__":
    sys.exit(main())
