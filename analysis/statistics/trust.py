"""Reasons not to trust a number, each with its figures. That none is found is no proof that there is none."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from analysis.statistics import sweeps
from analysis.statistics.loading import LoadedRun
from cbsim.draw.report import Caveat
from cbsim.metrics import coverage, metrics
from cbsim.metrics.metrics import ENOUGH, SAMPLES_NEEDED
from cbsim.metrics.terminal import lookup
from cbsim.record.record import HANDED_OFF
from cbsim.record.tables import ENDED, Floats, Ints
from cbsim.scenario import demand

USUAL, EARLY = 0.9, 0.05
"""Warm-up: until USUAL of the median occupancy is reached; reported if that takes EARLY of the requests."""
FIRST, SLOW, ALIKE = 5, 3.0, 2.0
"""Slow start: one of the FIRST steps lasts SLOW times the median of later ones with tokens within a factor ALIKE."""
TAIL = 0.1
NEAR_FULL = 0.9
"""Capacity: share of the KV blocks in use above which their number determines waits and preemptions."""
MOST_IN_FULL, MOST_NAMED = 2, 8  # runs with a caveat of one kind each, and runs named in one of many
NO_MODEL = re.compile(r"(\d+(g|gb|gib)|hbm\d+e?|gddr\d+x?|sxm\d*|pcie\d*|mig\d*)")


def caveats(runs: Sequence[LoadedRun]) -> list[Caveat]:
    """Return the caveats of runs, the gravest first; one a kind and run, the same text only once."""
    among = [Caveat(kind, "", reason) for kind, rule in AMONG for reason in [rule(runs)] if reason]
    single = [caveat for kind, rule in RULES.items() for caveat in _of_kind(kind, rule, runs)]
    return sorted([*among, *single], key=lambda caveat: list(RULES).index(caveat.kind))


def _of_kind(kind: str, rule: Callable[[LoadedRun], str | None], runs: Sequence[LoadedRun]) -> list[Caveat]:
    """Return a rule's caveats: one a run of two; of more runs one in all, with the first one's figures."""
    reasons = {run.label: reason for run in runs if (reason := rule(run))}
    texts, count, total = [*dict.fromkeys(reasons.values())], len(reasons), len(runs)
    if len(texts) > 1 and total <= MOST_IN_FULL:
        return [Caveat(kind, run, reason) for run, reason in reasons.items()]
    named = ", ".join([*reasons][:MOST_NAMED]) + (f" and {count - MOST_NAMED} more" if count > MOST_NAMED else "")
    whose = named if total <= MOST_IN_FULL else f"{count} of {total} runs ({named})"
    if count == total > 1:
        whose = f"all {count} runs" if len(texts) > 1 else ""
    first = f"{kind}, e.g. {next(iter(reasons))}: " if len(texts) > 1 else ""
    return [Caveat(kind, whose, f"{first}{text}") for text in texts[:1]]


def _incomplete(run: LoadedRun) -> str | None:
    if run.incomplete or not run.summary.get("complete", True):
        return f"the run is incomplete: {run.incomplete or 'it was cut short'}. Its numbers are those of what there is."
    return None


def _overload(run: LoadedRun) -> str | None:
    return metrics.overload(run.times) if is_open(run) else None


def _servers(run: LoadedRun) -> str | None:
    """Report that figures of steps show one of several servers."""
    several = run.summary.get("servers", 1)
    shown = "figures of steps show the first, lanes of one run those of the first four, numbers are of all."
    return f"of {several} servers; {shown}" if several > 1 else None


def _near_capacity(run: LoadedRun) -> str | None:
    """Report that waiting dominates TTFT, though the queue may not grow: near capacity it is long and varies slowly."""
    if not is_open(run) or _overload(run) or not sweeps.waits(run):
        return None
    wait = f"{run.summary['queue_s']['p95']:.3g} s of {run.summary['ttft_s']['p95']:.3g} s TTFT are time in the queue"
    return f"at p95 {wait}: the server is near its capacity or beyond, and a longer run may well give other latencies."


def _calibration(run: LoadedRun) -> str | None:
    """Report a cost model used beyond its calibration."""
    if run.measured:
        return None
    return "; ".join(coverage.warnings(run.scenario, run.table)) or None


def _not_done(run: LoadedRun) -> str | None:
    counts = run.summary["requests_by_status"]
    unfinished = [
        f"{count:,} {status}" for status, count in counts.items() if count and status not in (*ENDED, HANDED_OFF)
    ]
    if not unfinished:
        return None
    reasons = run.requests["reason"][run.requests["reason"] != ""]
    why = f" Most often: {reasons.mode()[0]}." if len(reasons) else ""
    total = run.summary["requests"]
    return f"of {total:,} requests {', '.join(unfinished)}: they are in no latency of a request.{why}"


def _window(run: LoadedRun) -> str | None:
    if not run.summary.get("window_s"):
        return None
    low, high = ("" if edge is None else f"{edge:g}" for edge in run.summary["window_s"])
    counted = f"{len(run.counted):,} of {len(run.requests):,} requests, those that arrive in {low}:{high} s"
    return f"latencies and SLO are of {counted}; all other numbers are the whole run's."


def _arrivals_limit(run: LoadedRun) -> str | None:
    """Report that a server keeps up: throughput is that of the traffic; no scheduler or loop could raise it much."""
    if not is_open(run) or not sweeps.keeps_up(run) or sweeps.waits(run):
        return None
    return "the server keeps up with the arrivals: throughput and cost are this load's, not the most it can serve."


def _warm_up(run: LoadedRun) -> str | None:
    """Report arrivals before the server first holds its usual number of requests: it is emptier for them."""
    if not is_open(run) or run.summary.get("window_s") or len(run.table) < ENOUGH:
        return None
    arrival, start = run.requests["arrival_ns"].to_numpy(), run.table["schedule_start_ns"]
    later = (start > (arrival.min() + arrival.max()) / 2) & (start <= arrival.max())
    if not later.any():
        return None
    usual = float(np.median(run.table["running"][later]))
    reached = int(start[np.argmax(run.table["running"] >= USUAL * usual)])
    early, total = int((arrival < reached).sum()), len(arrival)
    if early <= EARLY * total:
        return None
    return (
        f"{early:,} of {total:,} requests arrived before the server first ran {usual:g}, its median, at "
        f"{(reached - run.start_ns) / 1e9:.3g} s; they count in latencies, and `cbsim run --window` would leave them "
        "out."
    )


def _slow_start(run: LoadedRun) -> str | None:
    """Report early steps in a measured run that took far longer than later ones of about as many tokens."""
    lasted = (run.table["update_end_ns"] - run.table["schedule_start_ns"]) / 1e6
    tokens = run.table["tokens"]
    if not run.measured or len(lasted) < FIRST + ENOUGH:
        return None
    factor, step = max((_factor(lasted, tokens, step), step) for step in range(FIRST))
    ratio = f"{factor:.3g} times later ones of as many tokens"
    return f"step {step} took {lasted[step]:.3g} ms, {ratio}." if factor > SLOW else None


def _factor(lasted: Floats, tokens: Ints, step: int) -> float:
    later = slice(FIRST, None)
    alike = (tokens[later] * ALIKE >= tokens[step]) & (tokens[later] <= ALIKE * tokens[step]) & (tokens[step] > 0)
    return float(lasted[step] / np.median(lasted[later][alike])) if alike.sum() >= FIRST else 0.0


def _tail(run: LoadedRun) -> str | None:
    """Report a long tail after the last step that ran half of the most requests, unless requests arrive over time."""
    span = run.end_ns - run.start_ns
    arrivals = lookup(run.scenario, "workload.arrivals.kind")
    if arrivals not in ("at_once", "closed_loop") or len(run.table) < ENOUGH or not span:
        return None
    running, ends = run.table["running"], run.table["update_end_ns"]
    most = int(running.max())
    rest = run.end_ns - int(ends[np.flatnonzero(running >= most / 2)[-1]])
    if rest <= TAIL * span:
        return None
    lasted = f"{rest / 1e9:.3g} s, {rest / span:.0%} of the span"
    return f"for the last {lasted}, fewer than half of at most {most:,} requests ran; rates are over the whole span."


def _few(run: LoadedRun) -> str | None:
    n = int(run.summary["ttft_s"]["n"])
    short = [f"{name} needs {needed}" for name, needed in SAMPLES_NEEDED.items() if n < needed]
    return f"latencies are of {n:,} requests, too few: {', '.join(short)}." if short else None


def _modelled(run: LoadedRun) -> str | None:
    """Report the origin of the device's times, unless it is a GPU."""
    device = str(run.environment.get("device"))
    if device == "modelled":
        return "the loop was measured, but its kernels take the scenario's cost model: nothing was computed."
    if run.measured and device.startswith("cpu"):
        return f"measured on a CPU ({device}): its times are not those of a GPU."
    return None


def _capacity(run: LoadedRun) -> str | None:
    """Report a cache that was nearly full, and whose size was derived from the memory."""
    if run.measured or (run.scenario.get("kv_cache") or {}).get("num_blocks") is not None or not len(run.table):
        return None
    total = run.summary["total_blocks"]
    share = int(run.table["used_blocks"].max()) / total
    if share < NEAR_FULL:
        return None
    blocks = f"{total:,} blocks, which are derived from the memory and not measured"
    return f"KV use reaches {share:.0%} of {blocks}: with another number others wait or are preempted."


def _hardware(run: LoadedRun) -> str | None:
    """Report that the scenario's GPU is another model than the one measured on."""
    device, named = str(run.environment.get("device")), str(run.scenario.get("hardware", {}).get("name"))
    if run.measured and models(device) and models(named) and not models(device) & models(named):
        return f"measured on {device}, while the scenario's hardware is {named}: price and memory are the latter's."
    return None


def models(name: str) -> set[str]:
    """Return the words of a device's name that identify its model: those with digits, without memories and sockets."""
    names = re.findall(r"[a-z]*\d+[a-z]*\d*[a-z]*", name.lower())
    return {word for word in names if not NO_MODEL.fullmatch(word)}


def _injected(run: LoadedRun) -> str | None:
    extra = {phase: ms for phase, ms in (run.environment.get("injected_ms") or {}).items() if ms}
    added = ", ".join(f"{ms:g} ms to {phase}" for phase, ms in extra.items())
    return f"CPU work was added to every step on purpose: {added}." if added else None


def _notes(run: LoadedRun) -> str | None:
    notes = run.environment.get("notes") or ()
    return f"{run.environment.get('engine', 'the engine')} ran with: {'; '.join(map(str, notes))}." if notes else None


def _assumed(run: LoadedRun) -> str | None:
    """Report what simulated step times rest on, and how far off they are known to be."""
    basis, kind = run.environment.get("step_times"), run.scenario.get("cost", {}).get("kind")
    assumed = basis and not run.measured and kind in ("roofline", "table")
    return f"simulated step times rest on {basis}." if assumed else None


def _code(run: LoadedRun) -> str | None:
    git = run.environment.get("git") or {}
    if not git.get("commit"):
        return "the commit of the code is not known: the run cannot be traced to it."
    return f"made by changed code: the tree of commit {git['commit'][:10]} was dirty." if git.get("dirty") else None


def _devices(runs: Sequence[LoadedRun]) -> str | None:
    devices = {str(run.environment.get("device")) for run in runs if run.measured}
    return f"measured on different devices: {', '.join(sorted(devices))}." if len(devices) > 1 else None


def _commits(runs: Sequence[LoadedRun]) -> str | None:
    commits = {str(commit)[:10] for run in runs if (commit := (run.environment.get("git") or {}).get("commit"))}
    return f"made by different commits: {', '.join(sorted(commits))}." if len(commits) > 1 else None


def _packages(runs: Sequence[LoadedRun]) -> str | None:
    """Report packages of several known versions; one absent in a run was not loaded, which is no difference."""
    facts = [{"python": run.environment.get("python"), **(run.environment.get("packages") or {})} for run in runs]
    names = dict.fromkeys(name for fact in facts for name in fact)
    versions = {name: sorted({str(fact[name]) for fact in facts if fact.get(name)}) for name in names}
    several = [f"{name} {', '.join(seen)}" for name, seen in versions.items() if len(seen) > 1]
    return f"made with different versions: {'; '.join(several)}." if several else None


def is_open(run: LoadedRun) -> bool:
    """Whether requests arrive over time, independently of the server."""
    return demand.is_open(run.scenario.get("workload", {}))


RULES: dict[str, Callable[[LoadedRun], str | None]] = dict(  # by weight
    [
        *(("incomplete", _incomplete), ("overload", _overload), ("near capacity", _near_capacity)),
        *(("capacity", _capacity), ("window", _window), ("calibration", _calibration), ("not done", _not_done)),
        ("servers", _servers),
        *(("device", _modelled), ("hardware", _hardware), ("injected", _injected), ("slow start", _slow_start)),
        *(("warm-up", _warm_up), ("arrival-limited", _arrivals_limit), ("few requests", _few), ("tail", _tail)),
        *(("assumed", _assumed), ("engine", _notes), ("code", _code)),
    ]
)
AMONG: Sequence[tuple[str, Callable[[Sequence[LoadedRun]], str | None]]]
AMONG = (("hardware", _devices), ("code", _commits), ("code", _packages))
