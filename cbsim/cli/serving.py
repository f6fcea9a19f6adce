"""`serve` and `drive`: a simulated server for real clients, in real, scaled or virtual time."""

from __future__ import annotations

import argparse
import asyncio
import math

from cbsim.cli.sessions import door_arguments, options_of, scenario_of, session_arguments


def serve_arguments(parser: argparse.ArgumentParser) -> None:
    session_arguments(parser)
    door_arguments(parser)
    parser.add_argument("--clock", type=_clock, default=1.0, metavar="real|scale=X", help="how fast time passes (real)")


def drive_arguments(parser: argparse.ArgumentParser) -> None:
    session_arguments(parser)
    parser.add_argument("client", metavar="MODULE:FUNCTION", help="an asynchronous function; or: vllm bench serve")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="...", help="its own arguments")


def serve(arguments: argparse.Namespace) -> int:
    from cbsim.endpoint import command
    from cbsim.endpoint.tokenizer import open_tokenizer
    from cbsim.serving.clocks import RealClock
    from cbsim.serving.session import open_session

    words = f"python -m cbsim serve {arguments.scenario}"
    clock, tokenizer = RealClock(arguments.clock), open_tokenizer(arguments.tokenizer)
    opened = open_session(scenario_of(arguments), clock, tokenizer, arguments.served_model_name, words)
    return asyncio.run(command.serve(opened.backend, opened.run, opened.backend.log, options_of(arguments)))


def drive(arguments: argparse.Namespace) -> int:
    from cbsim.serving import drive

    return drive.run(
        scenario_of(arguments),
        [arguments.client, *arguments.words],
        arguments.out,
        model=arguments.served_model_name,
        tokenizer=arguments.tokenizer,
        quiet=arguments.quiet,
    )


def _clock(text: str) -> float:
    """Simulated seconds in a real one."""
    name, equals, number = text.partition("=")
    if text == "real":
        return 1.0
    try:
        scale = float(number)
    except ValueError:
        scale = math.nan
    if name != "scale" or not equals or not 0 < scale <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r}: expected real, or scale=X with 0 < X <= 1000")
    return scale
