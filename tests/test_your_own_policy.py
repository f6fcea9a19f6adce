"""The policy of docs/your_own_policy.md, exactly as it stands there: in both worlds, replayed, reported, listed."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from own_policy import EAGER, TEXT
from support.calls import ROOT, Said, call, environment, refused, runs

import cbsim
from analysis.cli.parser import main as analysis
from cbsim.runs.replan import rederive
from cbsim.schedulers import registry

NAME = 'scheduler={name: "shortest:SHORTEST", seats: 2}'


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """`shortest.py` in the folder where the user works."""
    path = tmp_path / "shortest.py"
    path.write_text(TEXT)
    path.with_name("eager.py").write_text(EAGER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield path
    for name in ("shortest", "eager"):
        sys.modules.pop(name, None)


def test_it_is_short() -> None:
    assert len(TEXT.splitlines()) < 120
    assert len([line for line in TEXT.splitlines() if line.strip()]) < 100


@pytest.mark.parametrize("loop", ["sync", "async"])
def test_it_runs_simulated_is_derived_again_and_reported(small: Path, out: Path, loop: str) -> None:
    """The shortest prompt that waits goes first, the plans are derived again, a report is made."""
    said = call("run", small, "--set", NAME, "--loop", loop, "--out", out, "--quiet")
    assert (said.status, said.err) == (0, "")
    (run,) = runs(out)
    verdict = rederive(run)
    assert verdict.difference is None
    assert verdict.matched == verdict.steps > 0
    assert "shortest:SHORTEST" in (run / "scenario.resolved.yaml").read_text()
    assert analysis(["report", str(run), "--out", str(out / "report")]) == 0


@pytest.mark.parametrize("loop", ["sync", "async"])
def test_it_runs_on_the_engine(out: Path, loop: str) -> None:
    pytest.importorskip("torch", reason="the engine needs torch")
    from cbengine.cli.parser import main

    words = ["--set", NAME, "--set", "workload.requests=5", "--loop", loop, "--device", "inline", "--quiet"]
    assert main(["replay", "tiny_cpu", *words, "--out", str(out)]) == 0
    (run,) = runs(out)
    assert rederive(run).difference is None


def test_its_settings_are_checked(small: Path, out: Path) -> None:
    for fields, *words in (
        ('name: "shortest:SHORTEST", seats: 0', "seats", ">= 1"),
        ('name: "shortest:SHORTEST", seat: 1', "unknown field", "seats"),
        ('name: "shortest:NONE"', "shortest:NONE", "AttributeError"),
        ('name: "nowhere:KIND"', "nowhere", "ModuleNotFoundError"),
    ):
        refused(call("run", small, "--set", f"scheduler={{{fields}}}", "--out", out), 2, *words)


SETTINGS_RAISE = """
    def __post_init__(self) -> None:
        raise OSError


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortestOptions"""
LINE, ROW, CHUNK = "        self.waiting.sort(", "if left and request.scheduled", "min(request.uncomputed, left), ())"
PLAN, UPDATED = "        rows, left = {}", "        return self.decoding.complete(plan, result, self.finish)"
END, FITS = "        self.decoding.end(request, reason)", "        fits ="
OPTIONS = "    return resolved(settings"
KEEPS = "        self.pool.tables[request] = self.pool._free.take(kept)"
EARLY = """        outcome = self.decoding.complete(plan, result, self.finish)
        early = [request for request in self.running if request.seen]
        for request in early:
            self.finish(request, Finish.STOP)
        ended = *outcome.finished, *((request.spec, Finish.STOP) for request in early)
        return Outcome(outcome.received, ended, outcome.wasted_rows)"""
BREAKS = {  # what the text becomes another text in, and what is said of it
    "forgets": (
        LINE,
        f"        self.requests.pop(spec)\n{LINE}",
        "step 0, add",
        "not one of the requests once it was added",
    ),
    "loses": (
        PLAN,
        f"        if self.waiting[1:]:\n            self.requests.pop(self.waiting[-1].spec, None)\n{PLAN}",
        "schedule",
        "is no longer one of the requests",
    ),
    "is-idle": ("return not self.requests", "return True", "step 0, idle", "has not ended"),
    "no-request": (
        *(ROW, f"self.requests.pop(request.spec, None)\n            {ROW}"),
        *("step", "which is not one of the requests"),
    ),
    "a-block-twice": (CHUNK, CHUNK.replace("()", "(0,)"), "step", "in the pool"),
    "over-budget": ("tokens=self.step_tokens", "tokens=10", "step 0", "10 query tokens are allowed"),
    "raises": (LINE, f"        raise OSError('no file is read')\n{LINE}", "step 0, add", "OSError: no file is read"),
    "a-stolen-table": (
        *(".admit(request)", ".admit(request)\n            self.pool.tables[request] = [0]"),
        *("step", "breaks a rule"),
    ),
    "no-blocks": ("self.pool.grow(request, needed)", "()", "schedule", "tokens, but its 0 KV blocks of"),
    "guesses": (
        CHUNK,
        CHUNK.replace(", ()", " + 1, (), guesses=1"),
        "schedule",
        "has 2 output tokens; a run records one",
    ),
    "too-far": (CHUNK, CHUNK.replace("left)", "left) + 1"), "schedule", "breaks a rule"),
    "not-made": (
        *("        self.options, self", "        1 / 0\n        self.options, self"),
        *("step 0, make", "ZeroDivisionError"),
    ),
    "returns-5": (PLAN, f"        return 5\n{PLAN}", "step 0, schedule", "is '5', expected StepPlan or None"),
    "updates-none": (UPDATED, UPDATED.replace("return ", ""), "update is 'None', expected Outcome"),
    "refuses-nothing": (
        FITS,
        f"        return ''\n{FITS}",
        "step 0, refusal",
        "refusal is '', expected a reason, or None",
    ),
    "refuses-5": (FITS, f"        return 5\n{FITS}", "step 0, refusal", "is '5', expected str or None"),
    "limits-none": ("options, options.limits", "options, None", "make", "limits is 'None', expected Limits"),
    "pool-none": (PLAN, f"        self.pool = None\n{PLAN}", "step 0, schedule", "AttributeError"),
    "no-pool": (
        "        self.waiting: list",
        "        self.pool = None\n        self.waiting: list",
        "make",
        "BlockPool",
    ),
    "wrong-tokens": (CHUNK, CHUNK.replace("left)", "left) * 1.0"), "schedule", "step"),
    "ends-early": (
        UPDATED,
        EARLY,
        *("update", "ends after 1 of"),
    ),
    "limit-of-1": ("add(spec, spec.max_tokens)", "add(spec, 1)", "update", "ends after 1 of"),
    "changes-a-request": (
        *(LINE, f"        object.__setattr__(spec, 'output_tokens', 1)\n{LINE}"),
        *("step 0, add", "output_tokens of request", "and is 1"),
    ),
    "changes-it-later": (
        *(PLAN, f"        for one in self.requests:\n            object.__setattr__(one, 'priority', 7)\n{PLAN}"),
        *("priority of request", "was 0 and is 7"),
    ),
    "exits": (PLAN, f"        raise SystemExit(0)\n{PLAN}", "step 0, schedule", "SystemExit: 0"),
    "is-stuck": (
        PLAN,
        f"        return None\n{PLAN}",
        "step 0, over",
        "no step can be planned for the requests that are left",
    ),
    "keeps": (END, f"{END[:-1]}, keeps_blocks=True)", "over", "are not freed"),
    "forgets-to-release": (
        END,
        f"        kept = self.pool.allocated(request)\n{END}\n{KEEPS}",
        *("schedule", "are not freed"),
    ),
    "leaks": (
        *(END, f"        self.pool.tables[request].pop(0)\n{END}"),
        *("schedule", "is lost, neither free nor in a table: request", "had it last"),
    ),
    "releases-twice": (
        *(END, f"        self.pool._free.give(self.pool.tables[request][:1], 0)\n{END}"),
        *("schedule", "was released twice: request", "had it last"),
    ),
}
UNSOLVED = {
    "resolves-none": (OPTIONS, f"    return None\n{OPTIONS}", "cannot solve its options", "block_size"),
    "resolves-x": (OPTIONS, f"    blocks = 'x'\n{OPTIONS}", "num_blocks of ShortestOptions(", "'x', expected int"),
    "resolve-exits": (OPTIONS, f"    raise SystemExit(0)\n{OPTIONS}", "cannot solve its options", "SystemExit"),
    "settings-raise": (
        *("\n\n@dataclass(frozen=True, slots=True, kw_only=True)\nclass ShortestOptions", SETTINGS_RAISE),
        *("cannot take its settings", "OSError"),
    ),
    "no-settings": ("settings=ShortestSettings", "settings=None", "cannot be checked: TypeError"),
    "no-annotation": ("seats: Count = 32", 'seats: "Missing" = 32', "cannot be checked"),
    "no-name": ('name="shortest"', "name=5", "has the name 5, expected letters, digits"),
    "a-path-for-a-name": ('name="shortest"', 'name="a/b\\n"', "has the name 'a/b\\n', expected letters, digits"),
    "import-raises": ("from dataclasses", "raise OSError('a\\nb')\nfrom dataclasses", "cannot be loaded: OSError: a b"),
    "import-exits": ("from dataclasses", "raise SystemExit(0)\nfrom dataclasses", "cannot be loaded: SystemExit"),
}


@pytest.mark.parametrize("fault", [*BREAKS, *UNSOLVED])
def test_what_it_breaks_is_said_in_a_line(module: Path, small: Path, out: Path, fault: str) -> None:
    """One line with the scheduler's name: it is the policy's error, not ours. Exit 1, or 2 before the run."""
    before, after, *words = (BREAKS | UNSOLVED)[fault]
    assert before in TEXT
    module.write_text(TEXT.replace(before, after))
    said = call("run", small, "--set", NAME, "--out", out, "--quiet")
    refused(said, 1 if fault in BREAKS else 2, "shortest:SHORTEST", *words)


def test_a_default_outside_its_own_bound_is_told_before_the_run(module: Path, small: Path, out: Path) -> None:
    module.write_text(TEXT.replace("step_tokens: Count = 2048", "step_tokens: Count = -5"))
    refused(call("run", small, "--set", NAME, "--out", out), 2, "scheduler.step_tokens: got -5, must be >= 1")


WITHOUT_ASSERTIONS = """
import json, sys
from pathlib import Path
from support.calls import call
assert False, "are dropped"
text, small, name = Path("shortest.py").read_text(), *sys.argv[1:3]
for fault, (before, after) in json.loads(sys.argv[3]).items():
    Path("shortest.py").write_text(text.replace(before, after) + f"# {fault}")
    sys.modules.pop("shortest", None)
    print(json.dumps([fault, *call("run", small, "--set", name, "--out", f"runs-{fault}", "--quiet")]))
"""


def test_what_it_breaks_is_said_without_assertions_too(module: Path, small: Path) -> None:
    """`python -O` drops every `assert`; the guard has none."""
    faults = {fault: BREAKS[fault][:2] for fault in BREAKS}
    done = subprocess.run(
        [sys.executable, "-B", "-O", "-c", WITHOUT_ASSERTIONS, str(small), NAME, json.dumps(faults)],
        stdout=subprocess.PIPE, text=True, check=False, cwd=module.parent,
        env=environment() | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{module.parent}"},
    )  # fmt: skip
    said = {fault: Said(*of) for fault, *of in map(json.loads, done.stdout.splitlines())}
    assert said.keys() == faults.keys()
    for of in said.values():
        refused(of, 1, "shortest:SHORTEST")


def leaking(text: str, step: int) -> str:
    """The policy, which forgets the first block of a running request once `step` steps are planned."""
    late = (
        f"        if self.decoding.batched.planned == {step}:\n            self.pool.tables[self.running[0]].pop(0)\n"
    )
    return text.replace(PLAN, late + PLAN)


def test_a_block_is_named_in_the_step_in_which_it_is_lost(module: Path, small: Path, out: Path) -> None:
    """No full check is due so late: the number of blocks in use gives it away."""
    module.write_text(leaking(TEXT, 37))
    said = call("run", small, "--set", NAME, "--set", "kv_cache.num_blocks=200000", "--out", out, "--quiet")
    refused(said, 1, "step 37, schedule", "is lost, neither free nor in a table: request", "had it last")


def test_a_block_that_no_plan_lists_is_named(module: Path, small: Path, out: Path) -> None:
    """It is in a table, so it is not lost; but an executor would not know of it."""
    grows = "        if self.decoding.batched.planned == 12:\n            self.pool.grow(self.running[0], 1)\n"
    module.write_text(TEXT.replace(PLAN, grows + PLAN))
    said = call("run", small, "--set", NAME, "--out", out, "--quiet")
    refused(said, 1, "step 12, schedule: breaks a rule: request ", "by its plans; ", "in the pool")


def test_everything_is_checked_in_every_step_if_asked_for(module: Path, small: Path, out: Path) -> None:
    """Two blocks change places: nothing that is counted tells, and a large cache is looked at only once."""
    swap = "self.pool.tables[self.running[0]].reverse()"
    late = f"        if self.decoding.batched.planned == 37:\n            {swap}\n"
    module.write_text(TEXT.replace(PLAN, late + PLAN))
    words = ["run", small, "--set", NAME, "--set", "kv_cache.num_blocks=200000", "--out", out, "--quiet"]
    assert call(*words).status == 0
    refused(call(*words, "--check-policy"), 1, "step 37, schedule", "by its plans")


@pytest.mark.parametrize("loop", ["sync", "async"])
def test_the_one_that_preempts_runs_and_is_derived_again(small: Path, out: Path, loop: str) -> None:
    """In a cache that is too small for all, requests lose their blocks, and every token comes all the same."""
    name, cache = 'scheduler={name: "eager:EAGER"}', "kv_cache.num_blocks=12"
    said = call("run", small, "--set", name, "--set", cache, "--loop", loop, "--out", out, "--quiet", "--check-policy")
    assert (said.status, said.err) == (0, "")
    (run,) = runs(out)
    verdict = rederive(run)
    assert verdict.difference is None and verdict.matched == verdict.steps
    result = cbsim.read(run)
    assert result.summary["preemptions"] > 0
    requests = result.requests.to_pydict()
    assert requests["generated_tokens"] == requests["output_tokens"]


def test_rows_count_by_what_they_do(small: Path) -> None:
    """Rows that a policy lists one by one are decode rows like those of a decode batch: one a token but the first."""
    for name in ("shortest:SHORTEST", "vllm"):
        result = cbsim.run(cbsim.load(small, f'scheduler={{name: "{name}"}}'))
        assert isinstance(result, cbsim.Result)
        steps, requests = result.step_numbers, result.requests.to_pydict()
        assert steps["decode_rows"].sum() == sum(requests["generated_tokens"]) - len(requests["id"])
        assert steps["prefill_tokens"].sum() == sum(requests["prompt_tokens"])


def test_an_entry_point_is_listed_and_in_the_schema(small: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package's scheduler has a name of its own everywhere."""
    entry = importlib.metadata.EntryPoint("shortest", "shortest:SHORTEST", registry.GROUP)
    monkeypatch.setattr(
        registry, "entry_points", lambda group, name=None: [entry] if name in (None, "shortest") else []
    )
    assert "shortest prompt first" in call("list").out
    assert call("schema", "--out", out / "schemas").status == 0
    assert "ShortestSettings" in json.dumps(json.loads((out / "schemas" / "scenario.schema.json").read_text()))
    assert call("run", small, "--set", "scheduler.name=shortest", "--out", out / "runs", "--quiet").status == 0
    assert call("replan", *runs(out / "runs")).status == 0


def test_a_broken_package_is_named_and_disturbs_nobody(
    module: Path, small: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one's package that cannot be imported, raises or exits is a line of `list`."""
    module.with_name("exits.py").write_text("raise SystemExit(0)")
    module.with_name("unchecked.py").write_text(TEXT.replace("seats: Count", "seats: list[Missing]"))
    broken = {"gone": "nowhere:KIND", "exits": "exits:KIND", "odd": "shortest:Shortest", "bad": "unchecked:SHORTEST"}
    entries = [importlib.metadata.EntryPoint(name, value, registry.GROUP) for name, value in broken.items()]
    found = lambda group, name=None: [each for each in entries if group == each.group and name in (None, each.name)]  # noqa: E731
    monkeypatch.setattr(registry, "entry_points", found)
    listed = call("list").out
    for name, error in {
        "gone": "ModuleNotFoundError",
        "exits": "SystemExit",
        "odd": "type",
        "bad": "NameError",
    }.items():
        (line,) = [line for line in listed.splitlines() if line.startswith(f"  {name} ")]
        assert "cannot be used" in line and error in line
    assert call("schema", "--out", out / "schemas").status == 0
    assert call("run", small, "--out", out / "runs", "--quiet").status == 0
    for name in broken:
        refused(call("run", small, "--set", f"scheduler.name={name}", "--out", out), 2, name)
