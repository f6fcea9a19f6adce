"""What is written down is true: commands parse, paths exist, fields, metrics and columns are documented, no others."""

from __future__ import annotations

import gzip
import json
import re
import shlex
from array import array
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import cbsim
from analysis.cli import parser as analysis
from analysis.statistics.trust import RULES
from cbengine.cli.parser import command_line
from cbengine.cli.parser import main as engine_main
from cbsim.cli import parser
from cbsim.conformance.reader import traces
from cbsim.metrics import catalogue, checks
from cbsim.metrics.metrics import SAMPLES_NEEDED
from cbsim.record import columns, optional_tables, parquet
from cbsim.record.record import TransferLog
from cbsim.scenario import catalog, scenario
from cbsim.scenario.demand import PRESETS
from cbsim.schedulers.registry import OURS
from reports import reference_tables
from reports.reference_tables import COLUMNS, MARK

ROOT = catalog.ROOT
README = ROOT / "README.md"
PAGES = sorted(page for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")) if page.is_file())
SCENARIOS, REFERENCE, METRICS, POLICIES, DIRECTORY = (
    ROOT / "docs" / f"{name}.md" for name in ("scenarios", "scenario_reference", "metrics", "policies", "run_directory")
)
Table = dict[str, Any]


# -- commands ---------------------------------------------------------------------------------------------------------


def blocks(page: Path) -> Iterator[str]:
    """Shell commands of a page, continuation lines joined."""
    for block in re.findall(r"^```(?:sh|bash)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        yield from block.replace("\\\n", " ").splitlines()


def commands(line: str) -> Iterator[list[str]]:
    """The words behind each `python -m cbsim` of a line, and behind `python -m` where `cbengine` or `analysis` follows;
    variables set for it, pipes and comments are left out.
    """
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if not re.fullmatch(r"[();<>|&]+", word):
            words.append(word)
            continue
        while words and re.fullmatch(r"\w+=.*", words[0]):
            del words[0]
        if words[:2] == ["python", "-m"] and words[2] in ("cbsim", "cbengine", "analysis"):
            yield words[3:] if words[2] == "cbsim" else words[2:]
        words = []


SHOWN = [(page.name, words) for page in PAGES for line in blocks(page) for words in commands(line)]


def test_commands_are_found() -> None:
    """The search sees what it should: several commands a line, settings before one, comments and quotes."""
    line = "A=1 python -m cbsim list && python -m cbsim run x --check 'a<1' | tail -1  # python -m cbsim bench"
    assert list(commands(line)) == [["list"], ["run", "x", "--check", "a<1"]]
    assert len(SHOWN) > 20


OTHERS = {"cbengine": command_line, "analysis": analysis._parser}


@pytest.mark.parametrize(("page", "words"), SHOWN, ids=lambda part: part if isinstance(part, str) else " ".join(part))
def test_every_command_shown_is_a_command(page: str, words: list[str]) -> None:
    """The real parser takes it; a scenario that it names exists and takes the overrides; its conditions are conditions.

    A scenario file outside scenarios/ is the reader's own, and so is a file of coefficients.
    """
    if words[0] in OTHERS:
        OTHERS[words[0]]().parse_args(words[1:])
        return
    arguments = parser._parser().parse_args(words)
    for condition in (*getattr(arguments, "check", ()), *getattr(arguments, "slo", ())):
        checks.parse(condition)
    if arguments.command == "run" and (not arguments.scenario.endswith(".yaml") or "scenarios/" in arguments.scenario):
        own = ROOT / arguments.scenario
        overrides = [each for each in arguments.set if ".fitted.yaml" not in each and "shortest:" not in each]
        scenario.load(own if own.is_file() else arguments.scenario, overrides)
    if arguments.command == "conformance":
        assert all((ROOT / path).exists() for path in arguments.paths)


# -- paths ------------------------------------------------------------------------------------------------------------


def mentioned(page: Path) -> set[str]:
    """Paths of the repository named in backticks or linked to."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    quoted = re.findall(r"`([\w.@-]+(?:/[\w.@*-]*)*)`", text)
    top = {entry.name for entry in ROOT.iterdir() if entry.is_dir()}
    paths = {name for name in quoted if "/" in name and name.split("/")[0] in top}
    paths |= {name for name in quoted if "/" not in name and re.fullmatch(r"[A-Za-z]+\.(md|toml)", name)}
    links = {link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in link}
    return paths | {str((page.parent / link).resolve().relative_to(ROOT)) for link in links}


FOLDERS = ("cbsim", "cbengine", "analysis", "reports", "tests")
MODULES = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")} | {"shortest.py", "eager.py"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_mentioned_exists(page: Path) -> None:
    """A star stands for anything, but for something."""
    missing = [path for path in sorted(mentioned(page)) if not any(ROOT.glob(path.rstrip("/")))]
    missing += [name for name in re.findall(r"`(\w+\.py)`", page.read_text()) if name not in MODULES]
    assert not missing


# -- generated tables -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", reference_tables.PAGES)
def test_the_tables_are_the_code_s(name: str) -> None:
    """Fields, bounds and defaults of the schema; declared columns; the catalogue of metrics."""
    page = (ROOT / "docs" / name).read_text()
    assert page == reference_tables.page(name), "run `python -m reports.reference_tables`"


def test_all_parts_names_and_options_are_documented() -> None:
    """Every part has one table; every name that a scenario can use, and every setting of every scheduler, is named."""
    marks = [mark for name in reference_tables.PAGES for mark in MARK.findall((ROOT / "docs" / name).read_text())]
    assert sorted(marks) == sorted(reference_tables.tables())
    text = SCENARIOS.read_text() + REFERENCE.read_text()
    names = [
        *PRESETS,
        *OURS,
        *(name for folder in ("", "lengths", "models", "hardware") for name in catalog.names(folder)),
    ]
    assert not [name for name in names if f"`{name}`" not in text]
    options = {field.name for kind in OURS.values() for field in fields(kind.settings)} - {"name"}
    assert not [name for name in options if f"`{name}`" not in POLICIES.read_text()]


def recorded(family: str) -> tuple[int, int]:
    """Golden traces and their lines, headers not counted."""
    found = traces(ROOT / "tests" / "golden" / family)
    return len(found), sum(len(gzip.decompress(trace.read_bytes()).splitlines()) - 1 for trace in found)


FAMILIES = {"vllm": "vLLM", "transformers": "transformers", "sarathi": "sarathi", "sglang": "SGLang"}


def test_counts_of_golden_traces() -> None:
    """Those of TensorRT-LLM restate its classes: they are no part of any claim of exactness."""
    changes, policies = " ".join((ROOT / "CHANGELOG.md").read_text().split()), POLICIES.read_text()
    exact = 0
    for family, name in FAMILIES.items():
        count, lines = recorded(family)
        exact += count
        assert f"{count} traces of the real" in policies and f", {lines:,} lines" in policies
        assert f"{count} of {name}" in changes
    count, lines = recorded("trtllm")
    assert f"{count} traces of *restated* classes, {lines:,} lines" in policies
    assert f"{count} traces of classes restated" in changes
    for page in (README, ROOT / "docs" / "fidelity.md"):
        assert f"{exact} " in page.read_text() and f"{exact + count} " not in page.read_text()


# -- metrics and columns ----------------------------------------------------------------------------------------------


def table_rows(heading: str, page: Path) -> list[list[str]]:
    """The cells of the tables under a heading of a page, their headers left out."""
    section = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", page.read_text(), re.MULTILINE | re.DOTALL)
    assert section, heading
    rows = re.findall(r"^\| (`.*) \|$", section[1], re.MULTILINE)
    return [re.split(r" \| ", row) for row in rows]


def listed(heading: str, page: Path = METRICS) -> list[str]:
    """What the first column of the tables under a heading names."""
    return [name for cells in table_rows(heading, page) for name in re.findall(r"`([^`]+)`", cells[0])]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Run directories of a small scenario that has everything a summary can have."""
    out = tmp_path_factory.mktemp("runs")
    small = ["workload.requests=2", "workload.output_tokens=3", "slo={preset: llama3.1-8b-server, e2e_s: 9}"]
    sets = [word for override in small for word in ("--set", override)]
    assert parser.main(["run", "worked_example", *sets, "--out", str(out), "--quiet"]) == 0
    return sorted(out.iterdir())


def leaves(summary: Table, path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of a summary; distributions, and mappings with free keys, are values."""
    for key, value in summary.items():
        if isinstance(value, dict) and "n" not in value and key != "bounds":
            yield from leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def test_the_summary_keys_are_documented(runs: list[Path]) -> None:
    """What is documented is in a summary and the other way round, and `--check` knows what is said to be checked."""
    moved = {
        "kv_moves": optional_tables.summarise_transfers(
            optional_tables.values_of(optional_tables.TRANSFERS, TransferLog().rows), 1.0
        )
    }  # of runs that move KV
    moved["imbalance"] = {"tokens": 1.0, "gpu_active": 1.0}  # of fleets
    moved["drafts"] = optional_tables.summarise_drafts(array("q", (0, 0, 8, 1, 2)))  # of runs with drafts
    moved["pipeline"] = optional_tables.summarise_stages(array("q", (0, 0, 0, 1)))  # of runs with stages
    names = [name.partition(".")[2] for name in catalogue.METRICS if name.startswith("scaling.")]
    moved["scaling"] = dict.fromkeys(names, 1.0)  # of fleets whose servers come and go, as is the status `retried`
    names = [name.partition(".")[2] for name in catalogue.METRICS if name.startswith("hand_off.")]
    moved["hand_off"] = dict.fromkeys(names, 1.0)  # of fleets with roles, as is the status `handed_off`
    further = {f"requests_by_status.{status}": 0 for status in ("retried", "handed_off")}
    given = further | dict(leaves(json.loads((runs[0] / "summary.json").read_text()) | moved))
    distributions = {key for key, value in given.items() if isinstance(value, dict) and "n" in value}
    assert sorted(listed("Distributions")) == sorted(distributions)
    assert sorted([*listed("Numbers"), *listed("Other keys")]) == sorted(given.keys() - distributions)
    statistics = listed("Statistics of a distribution")
    assert sorted(statistics) == sorted(given["ttft_s"])
    checked = {f"{d}.{s}" for d in distributions for s in statistics if s != "too_few_for"}
    assert {*listed("Numbers"), *checked} == set(catalogue.METRICS)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run on the engine, without a GPU, that keeps its tokens and samples a request apart."""
    pytest.importorskip("torch")
    out = tmp_path_factory.mktemp("measured")
    sets = ["--set", "workload.requests=2", "--set", "workload.output_tokens=3", "--loop", "sync"]
    apart = tmp_path_factory.mktemp("apart") / "one.jsonl"
    apart.write_text('{"id": "1", "temperature": 0.5}\n')
    more = ["--save-tokens", "--sampling", str(apart)]
    words = ["replay", "tiny_cpu", "--device", "modelled", *sets, *more, "--out", str(out), "--quiet"]
    assert engine_main(words) == 0
    (path,) = out.iterdir()
    return path


def in_file(path: Path) -> list[list[str]]:
    """Name, type, unit and definition of every column, from the file alone."""
    found = pq.read_schema(path)
    assert found.metadata[b"schema_version"] == str(parquet.SCHEMA_VERSION).encode()
    cells = []
    for field in found:
        kind = str(field.type).replace("element: ", "").replace("item: ", "")
        about = {key.decode(): value.decode() for key, value in field.metadata.items()}
        kind = f"{kind} or null" if field.nullable else kind
        cells.append([f"`{field.name}`", kind, about["unit"], about["definition"]])
    return cells


def test_a_file_s_own_columns_are_the_page_s(runs: list[Path], measured: Path) -> None:
    """Who has the file needs no page: name, type, unit and definition of each column are in it, in the page's order,
    whether a run was simulated or measured.
    """
    for name in ("steps.parquet", "requests.parquet"):
        assert in_file(runs[0] / name) == in_file(measured / name) == table_rows(name, DIRECTORY)
    assert in_file(measured / columns.TOKENS_FILE) == table_rows(columns.TOKENS_FILE, DIRECTORY)


def test_units_are_those_that_the_page_explains() -> None:
    """A column in ns says so in its name; every unit is one of a closed list."""
    for declared in COLUMNS.values():
        for column in declared:
            assert column.unit in ("ns", "tokens", "blocks", "rows", "requests", "count", "id", "text", "bytes")
            assert (column.unit == "ns") == column.name.endswith("_ns")
            assert (column.unit == "text") == (column.type == "string")


def test_the_files_of_a_run_are_documented(runs: list[Path], measured: Path) -> None:
    """Of both runs together: the picture of both loops lies in the second directory."""
    given = {str(file.relative_to(run)) for run in [*runs, measured] for file in run.rglob("*") if file.is_file()}
    given |= {"INCOMPLETE", "workload.FIELD.gz", "accepted.csv", *optional_tables.TABLES}
    assert sorted(listed("Files", DIRECTORY)) == sorted(given)


def test_the_facts_of_a_run_are_documented(runs: list[Path], measured: Path) -> None:
    """env.json of a simulated run, and what the engine adds to it. That of other devices is compared where they run."""
    common = list(json.loads((runs[0] / "env.json").read_text()))
    assert listed("env.json", DIRECTORY) == common
    rows = table_rows("env.json of a measured run", DIRECTORY)
    ours = [key.strip("`") for key, where, *_ in rows if {*where.split(", ")} & {"all", "engine", "modelled"}]
    found = json.loads((measured / "env.json").read_text())
    assert sorted(found) == sorted([*common, *ours])


def test_the_caveats_are_documented() -> None:
    text = (ROOT / "docs" / "analysis.md").read_text()
    assert [kind for kind in RULES if f"\n| `{kind}` |" not in text] == []


def examples(page: str) -> list[str]:
    """The blocks of Python of a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)


def test_python_in_the_documentation_runs(runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """What docs/analysis.md shows of a notebook, with run directories where it looks for them."""
    (example,) = examples("analysis.md")
    monkeypatch.chdir(runs[0].parent)
    exec(example.replace('Path("runs").glob("*8k_b32*")', 'Path(".").iterdir()'), {})


PYTHON = [
    block
    for page in ("python.md", "capacity.md", "tune.md", "recommend.md", "../README.md")
    for block in examples(page)
]


@pytest.mark.parametrize("example", PYTHON, ids=lambda text: text.strip().splitlines()[2])
def test_the_python_page_runs(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block of docs/python.md, docs/capacity.md and the README, on its own, in an empty folder."""
    if "import cbengine" in example:
        pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    exec(example, {})


def test_the_readme_shows_what_the_command_prints() -> None:
    """Its excerpt is lines of the table of 8k_b32, as they are."""
    printed = str(cbsim.run("8k_b32")).splitlines()
    (excerpt,) = re.findall(r"^```text\n(.*?)^\.\.\.\n```$", README.read_text(), re.MULTILINE | re.DOTALL)
    assert [line for line in excerpt.splitlines() if line not in printed] == []


def test_the_sizes_of_a_sufficient_sample_are_documented() -> None:
    assert all(f"{needed} values for {name}" in METRICS.read_text() for name, needed in SAMPLES_NEEDED.items())
