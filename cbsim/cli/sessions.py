"""The arguments of a session, simulated or real, and the values made of them."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from cbsim.cli.arguments import a_path, common_options, option, real, verb, whole

if TYPE_CHECKING:
    from cbsim.http.listen import ServeOptions
    from cbsim.scenario.scenario import Scenario


def session_arguments(parser: argparse.ArgumentParser) -> None:
    common_options(parser, "scenario", "--set", "--seed", "--check-policy")
    option(parser, "--loop", help="sync or async (the scenario's; of both async)")
    option(parser, "--out", default=Path("runs"), help="where its directory goes (runs)")
    served = "what clients ask for (the scenario's name)"
    parser.add_argument("--served-model-name", type=a_name, metavar="NAME", help=served)
    parser.add_argument("--tokenizer", type=a_path, metavar="DIR", help="folder of a tokenizer.json (ours)")
    option(parser, "--quiet", help="say where it serves, and nothing else")


def door_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=whole(0, 65_535), default=8000, help="0 for any free one (8000)")
    parser.add_argument("--api-key-file", type=a_path, metavar="FILE", help="keys, one a line; also CBSIM_API_KEY")
    parser.add_argument("--insecure", action="store_true", help="no key, and yet a host that others can reach")
    parser.add_argument("--grace", type=_grace, default=30.0, metavar="S", help="seconds for answers to end (30)")


def scenario_of(arguments: argparse.Namespace) -> Scenario:
    from cbsim.runs.served import with_one_loop
    from cbsim.scenario import scenario

    return with_one_loop(scenario.load(arguments.scenario, arguments.set))


def options_of(arguments: argparse.Namespace) -> ServeOptions:
    from cbsim.http.listen import ServeOptions
    from cbsim.http.settings import Settings, read_keys

    keys = read_keys(file=arguments.api_key_file)
    settings = Settings(keys=keys, insecure=arguments.insecure, grace_s=arguments.grace)
    return ServeOptions(arguments.host, arguments.port, arguments.out, settings, arguments.quiet)


@verb(
    "serve", "a simulated server for real clients: an OpenAI-compatible endpoint", "8k_b32 --clock scale=10 --port 8000"
)
def serve_arguments(parser: argparse.ArgumentParser) -> None:
    session_arguments(parser)
    door_arguments(parser)
    parser.add_argument("--clock", type=_clock, default=1.0, metavar="real|scale=X", help="how fast time passes (real)")


@verb("drive", "run an asyncio client against a simulated server in virtual time", "8k_b32 -- my_client:main")
def drive_arguments(parser: argparse.ArgumentParser) -> None:
    session_arguments(parser)
    parser.add_argument("client", metavar="MODULE:FUNCTION", help="an asynchronous function; or: vllm bench serve")
    parser.add_argument("client_arguments", nargs=argparse.REMAINDER, metavar="...", help="its own arguments")


def _grace(value: str) -> float:
    if not 0 <= (seconds := real(value)) < math.inf:
        raise argparse.ArgumentTypeError(f"{value!r}: expected seconds >= 0")
    return seconds


def a_name(value: str) -> str:
    if not value or not value.isprintable():
        raise argparse.ArgumentTypeError(f"{value!r}: expected letters that can be printed, at least one")
    return value


def _clock(value: str) -> float:
    """Parse a clock as the simulated seconds in a real one."""
    scale = 1.0 if value == "real" else real(value.removeprefix("scale=")) if value.startswith("scale=") else math.nan
    if not 0 < scale <= 1000:
        raise argparse.ArgumentTypeError(f"{value!r}: expected real, or scale=X with 0 < X <= 1000")
    return scale
