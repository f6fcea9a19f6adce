"""A served session: the engine behind its endpoint, and the loads of `cbsim measure` against it.

    python reports/hardware/served.py SCENARIO [--set FIELD=VALUE] [--device cuda] [--budget NAME=N,...] [--out DIR]

OUT/runs       the run directory of the server
OUT/measured   what its clients saw, to which `cbsim fit` fits terms: written anew by every call
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from cbsim.cli.arguments import Parser
from cbsim.cli.measured import measure_arguments
from cbsim.errors import INTERRUPTED
from cbsim.runs.progress import handled
from reports.own_engine import serving, started


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--device", choices=("cuda", "process", "inline"), default="cuda")
    parser.add_argument("--budget", default="seconds=30", help="of `cbsim measure` (seconds=30, at least 10)")
    parser.add_argument("--out", type=Path, default=Path("runs/served"), metavar="DIR")
    args = parser.parse_args(argv)
    client = Parser(prog=parser.prog)
    measure_arguments.arguments(client)
    client.parse_args(["http://127.0.0.1", "--budget", args.budget])  # before a server is started
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    changes = (word for change in args.set for word in ("--set", change))
    measured = args.out / "measured"
    try:
        with serving(args.scenario, args.out / "runs", *changes, "--device", args.device, "--quiet") as url:
            shutil.rmtree(measured, ignore_errors=True)
            line = ["cbsim", "measure", url, "--out", str(measured), "--budget", args.budget, "--yes"]
            client = started(["-m", *line])

            def interrupt(*_: object) -> None:
                client.kill()  # before it reports that the server, which the terminal may have interrupted, has ended
                raise KeyboardInterrupt

            try:
                with handled(interrupt, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    return client.wait()
            finally:
                client.kill()
                client.wait()
    except KeyboardInterrupt:
        print("served.py: interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
