"""The commands other than `run`: help, `list`, `schema`, `conformance`, and how the others say they are used."""

from __future__ import annotations

import argparse
import gzip
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.calls import ROOT, call, environment

from analysis.cli import parser as analysis
from cbengine.cli import parser as engine
from cbsim.cli import parser as simulator
from cbsim.scenario import catalog, scenario

GOLDEN = ROOT / "tests" / "golden"


def test_help_loads_nothing_heavy() -> None:
    """`python -m cbsim --help` answers in under 0.3 s because no library is imported for it; all commands are named."""
    program = (
        "import json, sys; from cbsim.cli.parser import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: print(json.dumps([end.code, sorted(sys.modules)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT, env=environment()
    )
    *text, last = done.stdout.splitlines()
    code, modules = json.loads(last)
    assert code == 0
    heavy = {"numpy", "pydantic", "simpy", "matplotlib", "pyarrow", "ruamel.yaml", "ruamel"}
    assert not heavy & set(modules)
    for command in ("run", "conformance", "replan", "occupancy", "schema", "list", "score", "bench"):
        assert any(line.split()[:1] == [command] for line in text), command


RAN = """
import gc, json, os, runpy, sys
import cbsim.errors  # the only module that comes before the first line that counts
gc.collect()
begun = gc.get_stats()
try: runpy.run_module("cbsim", run_name="__main__")
except SystemExit: pass
helped = "figwidth" in sys.modules["matplotlib.figure"].Figure.set.__doc__
alone = os.environ["OPENBLAS_NUM_THREADS"] == "1"
print(json.dumps([gc.get_stats() == begun and alone and not helped, *sys.modules]))"""
PACKAGES = {"cbsim", "simpy", "pydantic", "ruamel", "numpy", "pyarrow", "matplotlib"}
THEIRS = {"pydantic_core", "typing_extensions", "typing_inspection", "annotated_types", "librt", "PIL", "contourpy"}
THEIRS |= {"cycler", "dateutil", "fontTools", "kiwisolver", "packaging", "pyparsing", "six", "google"}
THEIRS |= {"cython_runtime", "_cyutility", "sitecustomize", "usercustomize", "mypy_extensions"}
SLOW = {"asyncio", "sqlite3", "pyarrow.compute", "pyarrow.dataset", "pandas", "matplotlib.pyplot", "torch", "ray"}
ROOMS = {
    "cli",
    "collector",
    "cost",
    "draw",
    "errors",
    "files",
    "kv",
    "live",
    "machine",
    "metrics",
    "policy",
    "record",
    "routers",
}
ROOMS |= {"runs", "scenario", "schedulers", "workload"}
ELSEWHERE = {
    *("cbsim.workload.csv_requests", "cbsim.workload.traces", "cbsim.workload.served", "cbsim.scenario.pretrained"),
    *("cbsim.runs.guard", "cbsim.runs.reading", "cbsim.runs.replan", "cbsim.machine.handoff"),
    "cbsim.schedulers.vllm.scheduler",
}
FAMILIES = {"base", "registry", "transformers", "vllm", "simple", "scaling"}  # vllm and simple: settings of defaults


def test_a_run_imports_what_it_needs(tmp_path: Path) -> None:
    """A scheduler of one family: no other family, no other command's rooms, nothing that only tables or sessions need.
    What is missing here costs every start: it is imported where it is needed, or has a reason and gets its name here.
    Nor are the objects of a start searched for cycles, help texts of matplotlib written, or threads of numpy started.
    """
    arguments = ["run", "worked_example", "--quiet", "--out", str(tmp_path)]
    ran = [sys.executable, "-c", RAN, *arguments]
    done = subprocess.run(ran, capture_output=True, text=True, check=True, cwd=ROOT, env=environment())
    spared, *modules = json.loads(done.stdout.splitlines()[-1])
    assert spared
    packages = {name.partition(".")[0] for name in modules} - sys.stdlib_module_names - {"__main__"}
    assert {name for name in packages if not name.startswith("_")} <= PACKAGES | THEIRS
    assert not (SLOW | ELSEWHERE) & {*modules}
    ours = [name.split(".") for name in modules if name.startswith("cbsim.")]
    assert {name[1] for name in ours} <= ROOMS
    kinds = {name[2] for name in ours if name[1] in ("schedulers", "routers") and len(name) > 2}
    assert kinds <= FAMILIES


def test_list_names_everything_that_a_scenario_can() -> None:
    """Schedulers, cost models, hardware, models, and the scenarios with their questions."""
    said = call("list")
    assert (said.status, said.err) == (0, "")
    words = {line.split()[0] for line in said.out.splitlines() if line.strip()}
    assert {"static", "transformers_fifo", "transformers_prefill_first", "vllm"} <= words
    assert {"constant", "roofline", "fitted", "table"} <= words
    for folder in ("hardware", "models", ""):
        assert set(catalog.names(folder)) <= words
    for name in catalog.names():
        assert scenario.load(name).question in said.out
    lines = {line.split()[0]: line for line in said.out.splitlines() if line.strip()}
    assert lines["deepseek-v3"].endswith("671.03 B parameters, 68.625 KiB of KV a token on every GPU")
    assert lines["llama-3.1-8b"].endswith("8.03 B parameters, 128 KiB of KV a token")


def test_schema_writes_what_the_repository_holds(tmp_path: Path) -> None:
    """`schema` writes the four schemas, the same bytes as in schemas/; the folder is made if need be."""
    said = call("schema", "--out", tmp_path / "new folder")
    assert (said.status, said.err) == (0, "")
    written = [Path(line) for line in said.out.splitlines()]
    assert sorted(path.name for path in written) == sorted(path.name for path in (ROOT / "schemas").iterdir())
    for path in written:
        assert path.read_bytes() == (ROOT / "schemas" / path.name).read_bytes(), f"run `cbsim schema`: {path.name}"


def test_conformance_of_a_part() -> None:
    """`conformance` takes files and folders, says a line a trace and a table, and exits 0 when all match."""
    one = next(iter(sorted((GOLDEN / "transformers").rglob("w11_cancel_fifo_bs16.jsonl.gz"))))
    two = next(iter(sorted((GOLDEN / "vllm" / "0.33.0").glob("w01*.jsonl.gz"))))
    said = call("conformance", one, two)
    assert (said.status, said.err) == (0, "")
    lines = said.out.splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["w11_cancel_fifo_bs16", "w01_basic.async"]
    assert lines[2].split() == ["scheduler", "version", "traces", "lines", "matched"]
    assert [line.split()[:3] for line in lines[4:6]] == [["transformers", "5.17.0", "1"], ["vllm", "0.33.0", "1"]]
    assert lines[6].split()[:2] == ["all", "2"]
    assert all(len({*line.split()[-2:]}) == 1 for line in lines[4:])


def test_conformance_of_a_difference_is_exit_1(tmp_path: Path) -> None:
    """One altered number in a trace: exit 1, and the first difference with its line and field."""
    source = next(iter(sorted((GOLDEN / "transformers").rglob("w11_cancel_fifo_bs16.jsonl.gz"))))
    lines = [json.loads(line) for line in gzip.decompress(source.read_bytes()).splitlines()]
    lines[4]["batch"][0]["past"] += 1
    (tmp_path / "w11_cancel_fifo_bs16.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shutil.copy(source.parent.parent / "workloads" / "w11_cancel_fifo_bs16.json.gz", tmp_path)
    said = call("conformance", tmp_path)
    assert said.status == 1, said
    assert "batch[0].past" in said.out


@pytest.mark.parametrize("path", ["nowhere", "empty"])
def test_conformance_of_nothing_is_no_success(path: str, tmp_path: Path) -> None:
    """A path without a trace is not a proof: exit 2, the path on stderr, and no table of nothing."""
    (tmp_path / "empty").mkdir()
    said = call("conformance", tmp_path / path)
    assert said.status == 2
    assert said.out == "" and str(tmp_path / path) in said.err
    assert "Traceback" not in said.err


# -- the verbs of the three command lines: none means two things, each shows an example -------------------------------

LINES = {
    "cbsim": (simulator.main, simulator._parser),
    "cbengine": (engine.main, engine.command_line),
    "analysis": (analysis.main, analysis._parser),
}


def verbs(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """A command line's commands, by name."""
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return dict(commands.choices)


VERBS = [(module, verb) for module, (_, make) in LINES.items() for verb in verbs(make())]


def test_no_verb_means_two_things() -> None:
    """`serve` means one thing: the same endpoint, in front of a simulated server or a real one."""
    names = [verb for pair in VERBS if pair != ("cbengine", "serve") for verb in pair[1:]]
    assert ("cbsim", "serve") in VERBS
    assert len(set(names)) == len(names)
    assert {"run", "conformance", "list", "schema", "bench", "replan", "score"} <= set(names)
    assert {("cbengine", "replay"), ("cbengine", "predict"), ("analysis", "compare")} <= set(VERBS)


@pytest.mark.parametrize(("module", "verb"), VERBS)
def test_help_ends_with_a_complete_example(module: str, verb: str) -> None:
    """It is one command of that name, which the parser takes."""
    parser = LINES[module][1]()
    label, _, example = verbs(parser)[verb].format_help().splitlines()[-1].partition(": ")
    words = shlex.split(example)
    assert (label, words[:4]) == ("example", ["python", "-m", module, verb])
    assert parser.parse_args(words[3:]).command == verb


@pytest.mark.parametrize("module", LINES)
def test_the_help_of_all_commands_ends_with_one(module: str) -> None:
    parser = LINES[module][1]()
    *_, last = parser.format_help().splitlines()
    assert last.startswith(f"example: python -m {module} ")
    assert parser.parse_args(shlex.split(last)[4:]).command
