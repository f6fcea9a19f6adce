"""The arguments of a session, simulated or real, and the values made of them."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from cbsim.cli.arguments import a_path, common_options, option, verb, whole, within
from cbsim.files import real

if TYPE_CHECKING:
    from cbsim.http.listen import ServeOptions


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


def options_of(arguments: argparse.Namespace) -> ServeOptions:
    from cbsim.draw import folder
    from cbsim.http.listen import ServeOptions
    from cbsim.http.settings import Settings, read_keys

    folder.check(arguments.out, shared=True)
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
    published = "publish KV events from this port on, a port a server; replays from the next ones on (none)"
    parser.add_argument("--kv-events", type=whole(1, 65_535), metavar="PORT", help=published)
    shares = "shares of requests that fail, by status 429, 500, 503, or break: a stream that breaks off"
    parser.add_argument("--fail", type=_shares, default={}, metavar="HOW=SHARE,...", help=shares)
    parser.add_argument("--fail-seed", type=whole(0, 1 << 62), metavar="S", help="which of them (0)")
    parser.add_argument("--start", type=_grace, default=0.0, metavar="S", help="seconds of 503 before it is ready (0)")


@verb(
    "route",
    "forward clients' requests to servers, by a router that can be simulated",
    "http://127.0.0.1:8001 http://127.0.0.1:8002 --router llmd --port 8000",
)
def route_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("servers", nargs="+", metavar="URL", help="a server: http://HOST:PORT")
    parser.add_argument("--router", default="least_in_flight", metavar="NAME", help="who gets a request")
    option(parser, "--set", metavar="FIELD=VALUE", help="a setting: router.FIELD, signals.metrics_s")
    parser.add_argument("--seed", type=whole(0, 1 << 62), default=0, metavar="N", help="of random choices (0)")
    option(parser, "--out", default=Path("runs"), help="where its directory goes (runs)")
    parser.add_argument("--tokenizer", type=a_path, metavar="DIR", help="folder of a tokenizer.json (ours)")
    option(parser, "--quiet", help="say where it serves, and nothing else")
    door_arguments(parser)


@verb("drive", "run an asyncio client against a simulated server in virtual time", "8k_b32 -- my_client:main")
def drive_arguments(parser: argparse.ArgumentParser) -> None:
    session_arguments(parser)
    parser.add_argument("client", metavar="MODULE:FUNCTION", help="an asynchronous function; or: vllm bench serve")
    parser.add_argument("client_arguments", nargs=argparse.REMAINDER, metavar="...", help="its own arguments")


def _grace(value: str) -> float:
    return within(value, real(value), 0 <= real(value) < math.inf, "seconds >= 0")


def a_name(value: str) -> str:
    return within(value, value, value.isprintable() and value != "", "letters that can be printed, at least one")


def _clock(value: str) -> float:
    """Parse a clock as the simulated seconds in a real one."""
    scale = 1.0 if value == "real" else real(value.removeprefix("scale=")) if value.startswith("scale=") else math.nan
    return within(value, scale, 0 < scale <= 1000, "real, or scale=X with 0 < X <= 1000")


def _shares(value: str) -> dict[str, float]:
    """Parse shares of requests, by how they fail."""
    from cbsim.http.failures import FAILURES

    shares = {name: real(share) for name, _, share in (part.partition("=") for part in value.split(","))}
    once = len(shares) > value.count(",") and shares.keys() <= {*FAILURES}
    bound = f"HOW=SHARE of {', '.join(FAILURES)}, each once, shares >= 0 of at most 1 together"
    return within(value, shares, once and min(shares.values()) >= 0 and sum(shares.values()) <= 1, bound)
