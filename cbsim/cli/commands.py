"""What the commands do. Arguments come in parsed; a number goes out, the exit status."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cbsim.cli.arguments import STUDIES
from cbsim.cli.many_runs import executor
from cbsim.cli.where import where_words
from cbsim.machine.simulation import Simulation
from cbsim.results import directory
from cbsim.scenario import scenario
from cbsim.scenario.fields import ScenarioError
from cbsim.server import run_command
from cbsim.server.run_command import RunOptions
from cbsim.server.status import ERROR, OK

if TYPE_CHECKING:
    from cbsim.draw.study import Study


def run(options: RunOptions) -> int:
    """Simulate a scenario under each of its loops, write the run directories, say what came out."""
    return run_command.run(options, Simulation)


def sweep(arguments: argparse.Namespace) -> int:
    """Make the runs of a sweep that are missing, and the table of all of them."""
    from cbsim.sweeps import command
    from cbsim.sweeps.sweep import Shard

    options = command.SweepOptions(
        arguments.file, arguments.store, Shard(*arguments.shard), arguments.json, arguments.quiet
    )
    return command.run(options, executor(arguments))


def conformance(paths: Sequence[Path]) -> int:
    """Compare our policies with recorded traces of the originals."""
    from cbsim.proof.conformance import check

    return check.run(paths, print)


def replan(paths: Sequence[Path]) -> int:
    """Derive recorded plans again; 1 if one differs."""
    from cbsim.server.replan import rederive

    status = OK
    for path in paths:
        verdict, incomplete = rederive(path), directory.load(path, whole=False).incomplete
        said = f"{path}: {verdict.matched} of {verdict.steps} plans identical"
        if verdict.difference is not None:
            said, status = f"{said}, then {verdict.difference}", ERROR
        print(f"{said}; the run is incomplete: {incomplete}" if incomplete else said)
    return status


def occupancy(paths: Sequence[Path], *, as_json: bool) -> int:
    """What the KV caches of runs held: of what was reserved, how much held tokens, would later, or never did."""
    from cbsim.results import terminal
    from cbsim.server import result
    from cbsim.server.occupancy import Shares

    names = ("kv_used_share", *Shares._fields, "fragmentation", "saved_share")
    rows: list[Sequence[str]] = [("steps", *names)]
    given: dict[str, dict[str, dict[str, float]]] = {}
    for path in paths:
        found = result.read(path).occupancy
        chosen = {"all": None} | ({"requests wait": found.waited} if found.waited.any() else {})
        for steps, mask in chosen.items():
            shares = found.shares(mask)
            numbers = (shares.kv_used_share, *shares, found.fragmentation(mask), found.saved_share(mask))
            rows.append((f"{path.name}, {steps}", *(terminal.shown(share, "share") for share in numbers)))
            given.setdefault(str(path), {})[steps] = dict(zip(names, numbers, strict=True))
    print(json.dumps(given) if as_json else terminal.aligned(rows))
    return OK


def schema(folder: Path) -> int:
    """Write the JSON schemas that editors use."""
    from cbsim.sweeps.sweep_file import SweepFile

    try:
        written = scenario.write_schemas(folder, {"sweep": SweepFile})
    except OSError as error:
        raise directory.RunError(f"{folder}: cannot be written: {error.strerror or error}") from error
    for path in written:
        print(path)
    return OK


def cache_curve(name: str, listed: str | None, block_tokens: int, as_json: bool) -> int:
    """How much of its prompts a Mooncake trace finds again in a prefix cache, by capacity."""
    from cbsim.proof.studies import cache_curve
    from cbsim.results import terminal
    from cbsim.workload import traces

    sizes = cache_curve.PAPER_TOKENS if listed is None else cache_curve.capacities(listed)
    curve = cache_curve.curve(traces.mooncake(cache_curve.find(name)), sizes, block_tokens)
    if as_json:
        print(json.dumps({"trace": name, **curve._asdict(), "points": [point._asdict() for point in curve.points]}))
        return OK
    about = f"{curve.distinct_blocks:,} distinct blocks of {block_tokens:,}"
    print(f"{name}: {curve.requests:,} requests, {curve.prompt_tokens:,} prompt tokens, {about}")
    rows = [("capacity, tokens", "whole blocks", "next block shared")]
    for capacity, *rates in curve.points:
        whole, following = (terminal.shown(rate, "fine share") for rate in rates)
        rows.append(("infinite" if capacity is None else f"{capacity:,}", whole, following))
    print(terminal.aligned(rows))
    return OK


def catalogue() -> int:
    """Everything that can be named in a scenario."""
    from cbsim.policy.schedulers import registry
    from cbsim.scenario import catalog, documents

    _section("schedulers", {name: kind.about for name, kind in registry.kinds().items()})
    _section("cost models", COST_MODELS)
    for folder, title in (("hardware", "hardware"), ("models", "models"), ("lengths", "lengths")):
        _section(title, {name: _about(folder, name) for name in catalog.names(folder)})
    questions = {}
    for name in catalog.names():
        questions[name] = str(documents.read(catalog.scenario(name)).data.get("question", ""))
    _section("scenarios", questions)
    return OK


def study(name: str, out: Path | None, *, as_json: bool) -> int:
    """Answer one of the questions in cbsim.proof.studies, and say or write the answer."""
    from importlib import import_module

    made: Study = import_module(f"cbsim.proof.studies.{STUDIES[name]}").study()
    return answer(made, out, ["study", name], "simulated", as_json=as_json)


def score(arguments: argparse.Namespace) -> int:
    """Replay a recorded run, or all of a folder of request logs, and say how far off the simulator is."""
    from cbsim.draw import folder
    from cbsim.proof.recorded import verdict as validation
    from cbsim.proof.request_logs import log

    out: Path | None = arguments.out
    if out is None and not arguments.json:
        out = Path("runs") / "score" / arguments.case.resolve().name
    if out is not None:
        folder.check(out)  # before the work, not after it
    if log.is_one(arguments.case):
        return _score_logs(arguments, out)
    if arguments.where:
        raise ScenarioError(f"--where: chooses runs of request logs; {arguments.case} holds no {log.REQUESTS}")
    validated = validation.validate(
        arguments.case,
        pack=arguments.data,
        hardware=arguments.hardware,
        overrides=arguments.set,
        ablate=arguments.ablate,
    )
    words = ["score", str(arguments.case), *(["--data", str(arguments.data)] if arguments.data else [])]
    words += ["--hardware", arguments.hardware] if arguments.hardware else []
    words += [word for change in arguments.set for word in ("--set", change)]
    words += ["--ablate"] if arguments.ablate else []
    return answer(validation.study(validated), out, words, "simulated against a recorded run", as_json=arguments.json)


def _score_logs(arguments: argparse.Namespace, out: Path | None) -> int:
    from cbsim.proof.request_logs import log, verdict

    for option in ("data", "hardware", "ablate"):
        if getattr(arguments, option):
            raise ScenarioError(f"--{option}: is for a case with config.json; {arguments.case} holds {log.REQUESTS}")
    made = verdict.study(arguments.case, arguments.where, arguments.set)
    words = ["score", str(arguments.case), *where_words(arguments.where)]
    words += [word for change in arguments.set for word in ("--set", change)]
    return answer(made, out, words, "simulated against recorded runs", as_json=arguments.json)


def answer(made: Study, out: Path | None, words: Sequence[str], kind: str, *, as_json: bool) -> int:
    """Say an answer, and write it to a folder if one is given. `words` make it again."""
    from cbsim.draw import study as studies

    if as_json:
        print(json.dumps(made.data, indent=2, allow_nan=False))
    else:
        studies.say(made)
    if out is not None:
        studies.write(made, out, shlex.join(["python", "-m", "cbsim", *words, "--out", str(out)]), kind)
        if not as_json:
            print(f"\nfigures   {out / 'report.md'}")
    return OK


COST_MODELS = {
    "constant": "a fixed time a step plus linear terms",
    "roofline": "FLOPs and bytes of the model's shape against the GPU's data sheet",
    "fitted": "coefficients calibrated on an engine's own run, from a YAML file",
    "table": "measured kernel times: vLLM layer profiles, or GEMM and attention tables",
}


def _about(folder: str, name: str) -> str:
    from cbsim.scenario import lengths, shapes

    if folder == lengths.FOLDER:
        table = lengths.load(name)
        return f"{table.name}: prompts and outputs together, at most {table.most_tokens:,} tokens"
    if folder == "models":
        model = shapes.model(name)
        return f"{model.parameters / 1e9:.2f} B parameters, {model.kv_bytes_per_token / 1024:g} KiB of KV a token"
    gpu = shapes.hardware(name)
    return f"{gpu.memory_bytes / 1e9:.0f} GB at {gpu.memory_bandwidth_bytes_s / 1e12:.2f} TB/s"


def _section(title: str, entries: Mapping[str, str]) -> None:
    print(f"{title}:")
    width = max((len(name) for name in entries), default=0)
    for name, about in entries.items():
        print(f"  {name:<{width}}  {about}")
    print()
