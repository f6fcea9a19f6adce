"""The commands as functions from parsed arguments to an exit status."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial

from cbsim.cli.arguments import check_out, run_options
from cbsim.cli.many_runs import executor
from cbsim.cli.sessions import options_of
from cbsim.errors import ERROR, OK, RunError, ScenarioError
from cbsim.files import access
from cbsim.machine.simulate import Simulation
from cbsim.runs import run_command
from cbsim.scenario import scenario


def run(arguments: argparse.Namespace) -> int:
    return run_command.run(run_options(arguments), partial(Simulation, jobs=arguments.jobs))


def sweep(arguments: argparse.Namespace) -> int:
    from cbsim.sweeps import sweep as sweeps

    workers, shard = executor(arguments), arguments.shard
    shown = {"as_json": arguments.json, "quiet": arguments.quiet, "command": arguments.line}
    return sweeps.run(arguments.file, arguments.store, workers, shard=shard, **shown)


def conformance(arguments: argparse.Namespace) -> int:
    from cbsim.conformance import check
    from cbsim.live import session

    if bool(arguments.live) == bool(arguments.paths):
        arguments.refuse("expected traces, or --live and a package, not both")
    if arguments.live:
        check_out(arguments.out)
        drawn = {"count": arguments.count, "seed": arguments.seed, "workload": arguments.workload}
        return session.run(arguments.live, **drawn, folder=arguments.out, out=partial(print, flush=True))
    return check.run(arguments.paths, print, partial(print, file=sys.stderr))


def replan(arguments: argparse.Namespace) -> int:
    """Derive recorded plans again; returns 1 if one differs."""
    from cbsim.runs import reading, replan, routing

    status = OK
    for path in arguments.runs:
        routed = (path / routing.FILE).exists()
        verdict = (routing if routed else replan).rederive(path)
        incomplete = reading.incomplete(path) if routed else reading.load(path, whole=False).incomplete
        kind = "choice" if routed else "plan"
        same = f"{verdict.matched} of {verdict.steps} {kind}s identical"
        line = f"{path}: {same if verdict.steps else f'there was no {kind} to compare'}"
        if verdict.difference is not None:
            line, status = f"{line}, then {verdict.difference}", ERROR
        print(f"{line}; the run is incomplete: {incomplete}" if incomplete else line)
    return status


def occupancy(arguments: argparse.Namespace) -> int:
    """Print the use of runs' KV caches: the shares of reserved blocks that are used, used later, or never used."""
    from cbsim.metrics import terminal
    from cbsim.runs import result
    from cbsim.runs.occupancy import Shares

    names = ("kv_used_share", *Shares._fields, "fragmentation", "saved_share")
    rows: list[Sequence[str]] = [("steps", *names)]
    numbers_of: dict[str, dict[str, dict[str, float]]] = {}
    for path in arguments.runs:
        occupied = result.read(path).occupancy
        chosen = {"all": None} | ({"requests wait": occupied.waited} if occupied.waited.any() else {})
        for steps, mask in chosen.items():
            shares = occupied.shares(mask)
            numbers = (shares.kv_used_share, *shares, occupied.fragmentation(mask), occupied.saved_share(mask))
            rows.append((f"{path.name}, {steps}", *(terminal.shown(share, "share") for share in numbers)))
            numbers_of.setdefault(str(path), {})[steps] = dict(zip(names, numbers, strict=True))
    print(json.dumps(numbers_of) if arguments.json else terminal.aligned(rows))
    return OK


def schema(arguments: argparse.Namespace) -> int:
    from cbsim.sweeps.sweep_file import SweepFile

    with access(arguments.out, RunError, "written"):
        written = scenario.write_schemas(arguments.out, {"sweep": SweepFile})
    for path in written:
        print(path)
    return OK


def catalogue(_: argparse.Namespace) -> int:
    from cbsim.scenario import catalog, costs, documents
    from cbsim.scenario.schedulers import ROUTERS, RULES, SCHEDULERS
    from cbsim.schedulers.registry import KindError

    broken = "(an installed package's; it cannot be used: {})"
    found = {
        n: broken.format(k) if isinstance(k, KindError) else f"{k.about} [{' '.join(s.value for s in k.serves)}]"
        for n, k in SCHEDULERS.kinds().items()
    }
    _section("schedulers [layers that they serve]", found)
    for title, of in (("routers", ROUTERS), ("rules of autoscaling", RULES)):
        kinds = of.kinds().items()
        _section(title, {n: broken.format(k) if isinstance(k, KindError) else k.about for n, k in kinds})
    _section("cost models", costs.models())
    for folder in ("hardware", "models", "lengths"):
        _section(folder, {name: _about(folder, name) for name in catalog.names(folder)})
    fields = {name: documents.read(catalog.scenario(name)).data for name in catalog.names()}
    _section("scenarios", {name: str(of.get("question", "")) for name, of in fields.items()})
    return OK


def serve(arguments: argparse.Namespace) -> int:
    import asyncio

    from cbsim.http import listen
    from cbsim.http.failures import Failures
    from cbsim.http.tokenizer import open_tokenizer
    from cbsim.virtual.clocks import Clock
    from cbsim.virtual.simulated import SimulatedBackend

    its, tokenizer = scenario.load(arguments.scenario, arguments.set), open_tokenizer(arguments.tokenizer)
    if its.fleet is not None and its.fleet.changes:
        bound = "expected as many servers all the time: each has a port"
        raise ScenarioError(f"{arguments.scenario}: fleet.{its.fleet.changes}: servers come and go, {bound}")
    if its.fleet is not None and its.fleet.hand_off is not None:
        bound = "must be null: each server has a port, and nothing in front of it hands requests over"
        raise ScenarioError(f"{arguments.scenario}: fleet.hand_off: {bound}")
    if arguments.port > (last := 65_536 - len(its.servers)):
        raise ScenarioError(f"--port: got {arguments.port}, expected at most {last}: a port a server")
    if arguments.fail_seed is not None and not arguments.fail:
        raise ScenarioError(f"--fail-seed: got {arguments.fail_seed}, expected --fail with it")
    failures = Failures(arguments.fail, arguments.fail_seed or 0, arguments.start)
    options = replace(options_of(arguments), failures=failures)
    backends, model = list[SimulatedBackend](), arguments.served_model_name or its.name
    for at, server in enumerate(its.servers):
        named = server if its.fleet is None else server.model_copy(update={"name": f"{its.name}-{at}"})
        backends.append(SimulatedBackend(named, Clock(arguments.clock), tokenizer, model, arguments.line))

    async def session() -> int:
        with ExitStack() as opened:
            if arguments.kv_events:
                from cbsim.virtual.kv_events import KvEvents

                listen.check_host(options.host, options.settings)
                for at, backend in enumerate(backends, arguments.kv_events):
                    opened.enter_context(closing(KvEvents(backend, options.host, at, at + len(backends))))
            return await listen.serve(backends, options)

    return asyncio.run(session())


def route(arguments: argparse.Namespace) -> int:
    import asyncio

    from cbsim.http import route
    from cbsim.http.settings import address
    from cbsim.http.tokenizer import open_tokenizer
    from cbsim.runs.routing import head_of

    head = head_of([address(url) for url in arguments.servers], arguments.router, arguments.set, arguments.seed)
    tokenizer, options = open_tokenizer(arguments.tokenizer), options_of(arguments)
    return asyncio.run(route.serve(head, tokenizer, options, arguments.line))


def drive(arguments: argparse.Namespace) -> int:
    from cbsim.virtual import server

    return server.drive(
        scenario.load(arguments.scenario, arguments.set),
        [arguments.client, *arguments.client_arguments],
        arguments.out,
        model=arguments.served_model_name,
        tokenizer=arguments.tokenizer,
        quiet=arguments.quiet,
    )


def _about(folder: str, name: str) -> str:
    from cbsim.scenario import demand, shapes

    if folder == demand.LENGTH_TABLES:
        table = demand.length_table(name)
        return f"{table.name}: prompts and outputs together, at most {table.most_tokens:,} tokens"
    if folder == "models":
        model = shapes.model(name)
        kv = f"{model.kv_bytes_per_token / 1024:g} KiB of KV a token{' on every GPU' if model.latent else ''}"
        return f"{model.parameters / 1e9:.2f} B parameters, {kv}"
    gpu = shapes.hardware(name)
    return f"{gpu.memory_bytes / 1e9:.0f} GB at {gpu.memory_bandwidth_bytes_s / 1e12:.2f} TB/s"


def _section(title: str, entries: Mapping[str, str]) -> None:
    print(f"{title}:")
    width = max((len(name) for name in entries), default=0)
    for name, about in entries.items():
        print(f"  {name:<{width}}  {about}")
    print()
