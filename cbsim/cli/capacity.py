"""`cbsim capacity`: its arguments, and what they mean."""

from __future__ import annotations

import argparse

from cbsim.cli.many_runs import executor, store_arguments

RATE = "workload.arrivals.rate_per_s"


def capacity_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("scenario", help="a scenario file, or the name of one that comes with the project")
    parser.add_argument(
        "--slo", action="append", default=[], metavar="COND", help="has to hold, e.g. 'ttft.p99<=2s' (repeatable)"
    )
    parser.add_argument("--goodput", metavar="SHARE", help="of requests within the scenario's slo, e.g. 99%%")
    parser.add_argument("--over", default=RATE, metavar="FIELD", help=f"a number of the workload ({RATE})")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="override any field (repeatable)"
    )
    parser.add_argument("--loop", choices=("sync", "async"), help="serving loop")
    parser.add_argument("--confidence", type=_share, default=0.95, metavar="SHARE", help="of the answer (95%%)")
    parser.add_argument("--width", type=_share, default=0.05, metavar="SHARE", help="of the answer at most (5%%)")
    parser.add_argument("--replicates", type=int, default=32, metavar="N", help="runs of a load at most (32)")
    parser.add_argument(
        "--warmup", type=_share, default=0.1, metavar="SHARE", help="of requests that do not count, the first (10%%)"
    )
    store_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one object: the interval, and every probe")


def capacity(arguments: argparse.Namespace) -> int:
    """Search; the exit status."""
    from cbsim.scenario import scenario as scenarios
    from cbsim.sweeps import capacity_command, terms

    loop = [] if arguments.loop is None else [f"loop.mode={arguments.loop}"]
    scenario = scenarios.load(arguments.scenario, [*arguments.set, *loop])
    names = ("confidence", "width", "replicates", "warmup")
    others = {name: getattr(arguments, name) for name in names}
    wanted = terms.terms(scenario, arguments.slo, arguments.goodput, **others)
    options = capacity_command.CapacityOptions(scenario, arguments.over, wanted, arguments.store, arguments.json)
    return capacity_command.run(options, executor(arguments))


def _share(text: str) -> float:
    """`5%` or 0.05."""
    number, scale = (text[:-1], 0.01) if text.endswith("%") else (text, 1.0)
    try:
        return float(number) * scale
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a share, such as 5% or 0.05") from None
