"""A served session: the engine behind its endpoint, and the loads of `cbsim measure` against it.

    python reports/hardware/served.py SCENARIO [--set FIELD=VALUE] [--device cuda] [--budget NAME=N,...] [--out DIR]

OUT/runs       the run directory of the server
OUT/measured   what its clients saw, to which `cbsim fit` fits terms: written anew by every call
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from reports.own_engine import serving


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--device", choices=("cuda", "process", "inline"), default="cuda")
    parser.add_argument("--budget", default="seconds=30", help="of `cbsim measure` (seconds=30)")
    parser.add_argument("--out", type=Path, default=Path("runs/served"), metavar="DIR")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    changes = (word for change in args.set for word in ("--set", change))
    measured = args.out / "measured"
    shutil.rmtree(measured, ignore_errors=True)
    with serving(args.scenario, args.out / "runs", *changes, "--device", args.device, "--quiet") as url:
        client = ["cbsim", "measure", url, "--out", str(measured), "--budget", args.budget, "--yes"]
        return subprocess.run([sys.executable, "-m", *client], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
