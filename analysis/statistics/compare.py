"""A comparison of two runs of one workload, metric by metric: how B differs from A, and whether beyond chance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from analysis.statistics import intervals
from analysis.statistics.comparable import check
from analysis.statistics.intervals import CONFIDENCE, Interval, Intervals
from analysis.statistics.loading import LoadedRun
from cbsim.draw.markdown import Table
from cbsim.metrics.catalogue import METRICS, SINGLE
from cbsim.metrics.metrics import SAMPLES_NEEDED
from cbsim.metrics.terminal import lookup, shown

FEW = 30  # samples; with fewer no interval is reliable
ONE_VALUE, TOO_FEW = "one value a run", "too few samples"
NOT_SEEN, MARK = "no difference seen", "*"
LEVEL = f"{CONFIDENCE * 100:.0f} %"


def _shown() -> Iterator[str]:
    """Yield the metrics of the terminal's table, with all percentiles of the main latencies and of ITL."""
    for metric in (name for name, each in METRICS.items() if each.listed):
        head, _, statistic = metric.partition(".")
        for name in ("itl_s", head) if head == "e2e_s" else (head,):
            if statistic == "p50":
                yield from (f"{name}.{part}" for part in intervals.STATISTICS[1:])
        if not statistic.startswith("p"):
            yield metric


SHOWN = tuple(_shown())


@dataclass(frozen=True, slots=True)
class MetricDifference:
    """A metric of two runs. `metric` is its dotted key in summary.json, `unit` as `terminal.shown` takes it.

    `a` and `b` are those of the summaries: of all requests of each run, while the interval may be based on fewer, which
    `method` states. `n` is the smaller run's samples. `few`: too few of them for this percentile, or for any interval.
    """

    metric: str
    label: str
    unit: str
    a: float
    b: float
    interval: Interval | None
    n: int
    method: str
    few: bool

    @property
    def is_share(self) -> bool:
        return self.unit.endswith("share")

    @property
    def delta(self) -> float:
        """B - A, in the metric's unit; of shares, 0.02 is 2 points."""
        return self.b - self.a

    @property
    def relative(self) -> float | None:
        """B / A - 1; None if A is not above 0."""
        return 0.0 if self.a == self.b else self.b / self.a - 1 if self.a > 0 else None

    @property
    def change(self) -> float | None:
        """`delta` of a share, `relative` of any other metric."""
        return self.delta if self.is_share else self.relative

    @property
    def range(self) -> tuple[float, float] | None:
        """The interval of `change`, None without one."""
        return self.interval and (self.interval.delta if self.is_share else self.interval.relative)

    @property
    def low(self) -> float | None:
        return self.range[0] if self.range else None

    @property
    def high(self) -> float | None:
        return self.range[1] if self.range else None

    @property
    def seen(self) -> bool | None:
        """Whether 0 is outside the interval; None without one."""
        return self.interval.seen if self.interval else None


def differences(a: LoadedRun, b: LoadedRun) -> list[MetricDifference]:
    """Return every metric that `--check` supports and both runs have. Raises Incomparable if they are."""
    check((a, b))
    requests, steps = intervals.of_requests(a, b), intervals.of_steps(a, b)
    left_out = ", ".join(
        f"{count - requests.units:,} of {count:,} in {side}"
        for side, run in (("A", a), ("B", b))
        if (count := int(run.counted["done"].sum())) > requests.units
    )
    methods = {
        True: _method("paired bootstrap over", requests, "requests", left_out),
        False: _method("block bootstrap over", steps, "steps", ""),
    }
    compared = []
    for metric, what in METRICS.items():
        before, after = (lookup(run.summary, metric) for run in (a, b))
        if before is not None and after is not None:
            of_requests = metric not in SINGLE and not metric.startswith("step_time_s")
            source = requests if of_requests else steps
            interval = source.by_metric.get(metric)
            method = methods[of_requests] if interval else _no_interval(metric)
            n = _samples(metric, (a.summary, b.summary), source if interval else None)
            few = _few(metric, n, source.units)
            compared.append(MetricDifference(metric, what.label, what.form, before, after, interval, n, method, few))
    return compared


def _no_interval(metric: str) -> str:
    statistic = "" if metric in SINGLE else metric.rpartition(".")[2]
    resampled = metric in intervals.SHARES or statistic in intervals.STATISTICS
    return TOO_FEW if resampled else ONE_VALUE


def _method(how: str, source: Intervals, noun: str, left_out: str) -> str:
    return f"{how} {source.units:,} {noun}, {source.replicates:,} draws{f'; without {left_out}' * bool(left_out)}"


def _samples(metric: str, summaries: Sequence[Mapping[str, object]], source: Intervals | None) -> int:
    """Return the values of a distribution in the smaller run; the units behind a share's interval; else 1."""
    if metric in SINGLE:
        return source.units if source else 1
    return min(int(lookup(summary, f"{metric.partition('.')[0]}.n")) for summary in summaries)


def _few(metric: str, n: int, units: int) -> bool:
    """Whether there are too few samples; gaps of few requests are few samples, however many they are."""
    if metric in SINGLE or metric.endswith(".n"):
        return False
    return min(n, units) < SAMPLES_NEEDED.get(metric.rpartition(".")[2], FEW)


def table(differences: Sequence[MetricDifference], a: str, b: str, *, everything: bool = False) -> Table:
    """Return a row a metric, `a` and `b` naming the runs; without `everything`, only the main metrics."""
    header = ("metric", a, b, "change", f"{LEVEL} interval")
    return Table("Differences", header, rows(differences, everything=everything), _note(differences))


def rows(differences: Sequence[MetricDifference], *, everything: bool) -> list[tuple[str, ...]]:
    """Return the cells of each metric: its name, A, B, the change and its interval."""
    known = {difference.metric: difference for difference in differences}
    chosen = [known[name] for name in (known if everything else SHOWN) if name in known]
    return [
        (f"{d.label} {MARK}" if d.few else d.label, *(shown(value, d.unit) for value in (d.a, d.b)), change_text(d),
         range_text(d))
        for d in chosen
    ]  # fmt: skip


def _note(differences: Sequence[MetricDifference]) -> str:
    methods = sorted({difference.method for difference in differences if difference.interval}, reverse=True)
    drawn = "; ".join(methods) or "none, for want of samples"
    return (
        f"Change of B against A, with {LEVEL} intervals: {drawn}. They know how much requests and steps vary within "
        "these runs, not another seed or another run of the same, and are too narrow where requests share a queue. "
        f"{MARK}: too few samples to rely on."
    )


def change_text(difference: MetricDifference) -> str:
    """Return text such as "+6.1 %" or "-2.0 pt"; "=" if nothing changed; in the metric's unit if A is 0."""
    if difference.a == difference.b:
        return "="
    if difference.change is None:
        return signed(difference.delta, difference.unit)
    return f"{difference.change * 100:+z.{_digits(difference.change)}f} {'pt' if difference.is_share else '%'}"


def range_text(difference: MetricDifference) -> str:
    """Return text such as "+5.2 .. +7.0 %", and what follows from it; or why there is none."""
    if not difference.interval:
        return difference.method
    if not any(difference.interval.delta):
        return NOT_SEEN
    if difference.range is None:
        ends = " .. ".join(signed(end, difference.unit) for end in difference.interval.delta)
    else:
        digits, unit = _digits(*difference.range), "pt" if difference.is_share else "%"
        ends = " .. ".join(f"{end * 100:+z.{digits}f}" for end in difference.range) + f" {unit}"
    return ends if difference.seen else f"{ends}: {NOT_SEEN}"


def _digits(*changes: float) -> int:
    return 1 if max(abs(change) for change in changes) >= 0.01 else 2


def signed(value: float, unit: str) -> str:
    """Return a difference in a metric's own unit; of shares, in points."""
    if unit.endswith("share"):
        return f"{value * 100:+z.{_digits(value)}f} pt"
    return f"{'-' if value < 0 else '+'}{shown(abs(value), unit)}"


def verdict(differences: Sequence[MetricDifference], *, everything: bool = False) -> list[str]:
    """Summarise the changes in two or three sentences: throughput and makespan, TTFT and TPOT, and the number of
    significant ones among the rows of the table or of `everything`.
    """
    known = {difference.metric: difference for difference in differences}
    totals = [known[name] for name in ("output_tokens_per_s", "makespan_s") if name in known]
    largest = [each for name in ("ttft_s", "tpot_s") if (each := _most(differences, name))]
    sentences = [f"{_changes(totals)} ({ONE_VALUE})."] * bool(totals) + [f"{_changes(largest)}."] * bool(largest)
    seen = [d.seen for d in differences if d.interval and (everything or d.metric in SHOWN)]
    if seen:
        by_chance = f"one in {round(1 / (1 - CONFIDENCE))} does by chance alone, or more where requests share a queue"
        sentences.append(f"{sum(map(bool, seen))} of {len(seen)} intervals of the table leave out 0; {by_chance}.")
    return [sentence[0].upper() + sentence[1:] for sentence in sentences]


def _changes(differences: Sequence[MetricDifference]) -> str:
    return "; ".join(f"{difference.label}: {_change(difference)}" for difference in differences)


def _most(differences: Sequence[MetricDifference], name: str) -> MetricDifference | None:
    """Return a latency's percentile that changed most; those with enough samples come first."""
    own = [d for d in differences if d.metric in (f"{name}.p50", f"{name}.p99") and d.interval]
    return max(own, key=lambda difference: (not difference.few, abs(difference.change or 0.0)), default=None)


def _change(difference: MetricDifference) -> str:
    if difference.a == difference.b:
        return "no change"
    if not difference.interval:
        return change_text(difference)
    return f"{change_text(difference)} ({range_text(difference)}){' of few samples' * difference.few}"
