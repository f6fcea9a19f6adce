"""The requests of a run, drawn or read by scenario and seed, and those that follow the end of others.

Every kind of random number has a generator of its own, spawned from the one seed: scenarios that differ in their
scheduler, or only in their arrivals, share all other random numbers exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbsim.errors import ScenarioError
from cbsim.files import until_changed
from cbsim.policy.request import RequestSpec
from cbsim.scenario import catalog, demand
from cbsim.scenario.rows import check_memory
from cbsim.scenario.scenario import Scenario
from cbsim.workload.requests import LONGEST_NS, Drawn, Ints, Streams, Users, Workload

FILE_FIELDS = ("path", "recorded")  # of a scenario
PACES = ("time_scale", "step_s", "rate_per_s", "think_s")  # fields of a workload or its arrivals that times follow from


def build(scenario: Scenario, supplied: str | None = None) -> Workload:
    """Build the workload of a scenario; `supplied` is the text of a `csv` workload's file that is not written yet, or
    of a session's log. Raises ScenarioError if a trace is missing or has a bad row, or requests come later than a run
    can last.
    """
    form = scenario.workload
    if supplied is not None:
        return _parsed(form, supplied)
    streams = Streams.of(scenario.seed)
    texts = scenario.kind.samples(scenario.scheduler)  # of equal length, for beam search
    if texts > 1 and (not isinstance(form, demand.Synthetic) or form.samples > 1):
        raise ScenarioError(f"workload: a search of {texts} texts a request needs kind synthetic with samples 1")
    made = _synthetic(form, streams, texts) if isinstance(form, demand.Synthetic) else _read(form, streams)
    if made.last_ns > LONGEST_NS:
        raise _too_late(form)
    return made


def _too_late(form: Any) -> ScenarioError:
    """Return the error of the field that puts requests later than a run can last."""
    part, within = (form.arrivals, "workload.arrivals") if hasattr(form, "arrivals") else (form, "workload")
    name = next(name for name in PACES if hasattr(part, name))
    field, value = f"{within}.{name}", getattr(part, name)
    bound = f"must let all come within {LONGEST_NS / 1e9:.3g} s, 73 years"
    return ScenarioError(f"{field}: got {value:g}, {bound}", field=field, value=value, bound=bound)


def still(scenario: Scenario) -> bool:
    """Return whether another seed gives the same requests, as with a trace, and no acceptance of drafts is drawn: then
    all replicates are one run.
    """
    drafts = [server.speculation for _, server in scenario.pools]
    if any(each is not None and each.acceptance.path is None for each in drafts):
        return False
    other = scenario.model_copy(update={"seed": scenario.seed + 1})
    return build(scenario).fingerprint() == build(other).fingerprint()


def files(value: Mapping[str, Any], field: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted field, path) for every file or folder that a scenario, or a part of it at `field`, names."""
    for name, part in value.items():
        if name in FILE_FIELDS and isinstance(part, str):
            yield f"{field}{name}", part
        elif isinstance(part, dict):
            yield from files(part, f"{field}{name}.")


def inputs(scenario: Scenario) -> dict[str, Path]:
    """Return the files that the workload is read from, those that are there, by their names in a run directory."""
    found = {}
    for field, path in files(scenario.workload.model_dump(), "workload."):
        with suppress(ScenarioError):
            found[f"{field}.gz"] = catalog.data(path, field)
    return found


def build_of_run(scenario: Scenario, folder: Path) -> Workload:
    """Build the workload of a run from the files in its directory, and from where they lay if it has none."""
    fields: dict[str, Any] = {"workload": scenario.workload.model_dump()}
    for field, _ in list(files(fields)):
        *parts, last = field.split(".")
        if (file := folder / f"{field}.gz").is_file():
            reduce(dict.__getitem__, parts, fields)[last] = str(file.absolute())
    form = type(scenario.workload).model_validate(fields["workload"])
    return build(scenario.model_copy(update={"workload": form}))


def draw(length: object, count: int, rng: np.random.Generator, name: str = "workload") -> Ints:
    """Draw `count` lengths in tokens."""
    if isinstance(length, demand.Uniform):
        return rng.integers(length.uniform.low, length.uniform.high, count, endpoint=True)
    if isinstance(length, demand.LognormalLength):
        shape = length.lognormal
        mu = np.log(shape.mean) - shape.sigma**2 / 2
        drawn = np.rint(rng.lognormal(mu, shape.sigma, count))
        return np.clip(drawn, shape.low, shape.high or 2**31).astype(np.int64)
    if isinstance(length, demand.Empirical):
        sample = length.empirical
        values = np.array(sample.values, dtype=np.int64)
        if sample.path is not None and sample.column is not None:
            values = _column(catalog.data(sample.path, f"{name}.empirical.path"), sample.column)
        return rng.choice(values, count)
    assert isinstance(length, int)
    return np.full(count, length, dtype=np.int64)


@until_changed
def _column(path: Path, name: str) -> Ints:
    from cbsim.workload import csv_requests

    return np.array(csv_requests.lengths(path, columns=(name,)), dtype=np.int64)[:, 0]


def draw_pairs(name: str, count: int, streams: Streams, samples: int = 1) -> tuple[Ints, Ints]:
    """Draw prompt and output lengths from a distribution that comes with the project: a prompt's, then for each of its
    samples an output's among those of prompts about as long.
    """
    table = demand.length_table(name)
    at, further = np.repeat(streams.prompts.random(count), samples), streams.outputs.random(count * samples)
    prompts, groups = _quantile(table.prompt_tokens, at), len(table.output_tokens)
    group = (at * groups).astype(np.int64)
    outputs = np.zeros(len(at), dtype=np.int64)
    for number, quantiles in enumerate(table.output_tokens):
        outputs[group == number] = _quantile(quantiles, further[group == number])
    return prompts, np.clip(outputs, 1, table.most_tokens - prompts)


def _quantile(quantiles: Sequence[int], at: NDArray[np.float64]) -> Ints:
    """Return the whole numbers nearest to the quantiles `at`, linear between those of the table."""
    return np.rint(np.interp(at, np.linspace(0, 1, len(quantiles)), quantiles)).astype(np.int64)


def arrival_times(arrivals: object, count: int, rng: np.random.Generator) -> Ints:
    """Return open-loop arrival times in ns; all 0 for requests that arrive at once or depend on the server."""
    if isinstance(arrivals, demand.Constant):
        times = np.arange(count) / arrivals.rate_per_s
    elif isinstance(arrivals, demand.Poisson):
        times = np.cumsum(rng.exponential(1 / arrivals.rate_per_s, count))
    elif isinstance(arrivals, demand.Gamma):
        scale = 1 / (arrivals.rate_per_s * arrivals.burstiness)
        times = np.cumsum(rng.gamma(arrivals.burstiness, scale, count))
    else:
        return np.zeros(count, dtype=np.int64)
    return np.rint(np.minimum(times * 1e9, 2 * LONGEST_NS)).astype(np.int64)


def _synthetic(form: demand.Synthetic, streams: Streams, texts: int = 1) -> Workload:
    """Draw requests. The `texts` of a request have one length; its `samples` each have a length of their own."""
    count, samples = form.requests, max(form.samples, texts)
    check_memory(count, samples)
    if form.lengths is not None:
        prompts, outputs = draw_pairs(form.lengths, count, streams, form.samples)
        prompts = np.repeat(prompts, texts)
    else:
        prompts = np.repeat(draw(form.prompt_tokens, count, streams.prompts, "workload.prompt_tokens"), samples)
        outputs = draw(form.output_tokens, count * form.samples, streams.outputs, "workload.output_tokens")
    outputs = np.repeat(outputs, texts)
    most = form.max_tokens or int(outputs.max())
    outputs = np.minimum(outputs, most)
    priorities = streams.priorities.choice(form.priorities, count) if form.priorities else np.zeros(count, np.int64)
    prefixes = streams.prefixes.integers(form.shared_prefixes, size=count) + count + 1
    drawn = Drawn(
        arrival_ns=np.repeat(arrival_times(form.arrivals, count, streams.arrivals), samples),
        prompt_tokens=prompts,
        output_tokens=outputs,
        max_tokens=np.full(count * samples, most) if form.stop_early else outputs,
        priority=np.repeat(priorities, samples),
        shared_tokens=form.shared_prefix_tokens,
        prefix=np.repeat(prefixes if form.shared_prefixes > 1 else 0 * prefixes, samples),
        samples=samples,
    )
    made, longest = _arriving(drawn, form.arrivals, streams.users, samples), int(prompts.max())
    if form.shared_prefix_tokens > longest:
        notice = f"got {form.shared_prefix_tokens:,}, but no prompt has more than {longest:,} tokens: all share all"
        made.notices = (f"workload.shared_prefix_tokens: {notice}",)
    return made


def _arriving(specs: Sequence[RequestSpec], arrivals: object, rng: np.random.Generator, samples: int = 1) -> Workload:
    if not isinstance(arrivals, demand.ClosedLoop):
        return Workload(specs, len(specs))
    users = specs[: arrivals.users * samples]
    draws = rng.spawn(len(users) // samples) if arrivals.think == "exponential" else []
    until_ns = None if arrivals.duration_s is None else round(arrivals.duration_s * 1e9)
    follow = Users(specs[len(users) :], round(arrivals.think_s * 1e9), draws, until_ns, samples)
    terms = (f"exponential {rng.bit_generator.state}\n" if draws else "") + (f"until {until_ns}\n" if until_ns else "")
    return Workload(users, len(specs), follow=follow, terms=terms)


def _parsed(form: object, supplied: str) -> Workload:
    from cbsim.workload import csv_requests, served

    if isinstance(form, demand.Served):
        return served.parse(Path(served.FILE), supplied.splitlines())
    drawn, _ = csv_requests.plain(Path("requests"), StringIO(supplied, newline=""))
    return Workload(drawn, len(drawn))


def _read(form: Any, streams: Streams) -> Workload:
    """Read requests that are not drawn. Each reader takes long to import, and is for its own kind alone."""
    if isinstance(form, demand.Lengths | demand.Azure | demand.Csv):
        from cbsim.workload import csv_requests

        if isinstance(form, demand.Csv):
            return csv_requests.workload(form)
        if isinstance(form, demand.Azure):
            recorded = csv_requests.azure(catalog.data(form.path), form.limit).scaled(form.time_scale)
            return Workload(recorded, len(recorded))
        prompts, outputs = np.array(csv_requests.lengths(catalog.data(form.path), form.limit)).T
        times = arrival_times(form.arrivals, len(prompts), streams.arrivals)
        return _arriving(Drawn(times, prompts, outputs, outputs, 0 * outputs), form.arrivals, streams.users)
    if isinstance(form, demand.Served):
        from cbsim.workload import served

        return served.read(catalog.data(form.path), form.limit)
    from cbsim.workload import scheduler_tests, traces, vllm_bench

    readers: dict[type, Callable[[], Workload]] = {
        demand.Mooncake: lambda: traces.mooncake_workload(form, streams),
        demand.Golden: lambda: scheduler_tests.golden(catalog.data(form.path), form.step_s, form.limit),
        demand.Agentic: lambda: traces.agentic_workload(form),
        demand.VllmBench: lambda: vllm_bench.workload(form),
    }
    return readers[type(form)]()
