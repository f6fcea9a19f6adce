"""`vllm bench serve`, as it is installed, as a client in virtual time."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable, Sequence
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from cbsim.scenario.fields import ScenarioError


def client(words: Sequence[str]) -> Callable[[str], Awaitable[Any]]:
    """VLLM's benchmark with these arguments; host and port are the server's. Raises ScenarioError."""
    try:
        serve: Any = import_module("vllm.benchmarks.serve")
    except ModuleNotFoundError as error:
        raise ScenarioError(f"client: vllm bench serve: {error.name} is not installed", field="client") from None
    parser = getattr(serve, "FlexibleArgumentParser", argparse.ArgumentParser)()
    serve.add_cli_args(parser)

    async def run(address: str) -> None:
        place = urlsplit(address)
        await serve.main_async(parser.parse_args([*words, "--host", str(place.hostname), "--port", str(place.port)]))

    return run
