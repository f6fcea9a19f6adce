"""Published servers whose prefill and decode are apart, and replicas beside them, simulated.

`python -m reports.fidelity.apart.make` makes the report; with the path of a folder of vllm bench's results, named as
llm-d's (`llm-d-2p1d__*.json`, `vllm-3replicas__*.json`), it prints the tables of these.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from cbsim.draw.chart import GREY, Chart, Line, Panel, Points, Style, series
from cbsim.draw.report import Table
from cbsim.errors import USAGE, UserError
from cbsim.measured.points import published, score
from cbsim.metrics.terminal import aligned
from cbsim.scenario import catalog, documents, scenario
from cbsim.scenario.fleet import with_fields
from cbsim.scenario.rows import CsvTable, open_text
from cbsim.scenario.scenario import Scenario
from cbsim.sweeps.store import SUMMARY
from cbsim.sweeps.work import Executor, Here, Processes, Task
from reports import page

SERVERS = documents.read(Path(__file__).with_name("servers.yaml")).data
PD, ROUTED = "public_measured/llm-d_pd", "public_measured/routed_servers/pd_gpt-oss.csv"
DRAWS = 10  # of arrivals and servers, of exp-7
MEANS, GPT_OSS, POINTS = (0.15, 0.15), (0.25, 0.25), (0.30, 0.15)  # the bars of TTFT and TPOT
RIGHT, WRONG = "right", "**wrong**"
NAME = re.compile(r"(?:(\d+)p(\d+)d|(\d+)replicas)__")
READ = {"ttft_mean_s": 1e3, "ttft_p95_s": 1e3, "latency_mean_s": 1e3}
COLUMNS = ("set", "arm", "source", *READ, "tpot_mean_ms")


@dataclass(frozen=True, slots=True)
class Seen:
    """Milliseconds by statistic (`ttft_s mean`), as published or of each draw."""

    name: str
    published: Mapping[str, float]
    draws: Sequence[Mapping[str, float]]

    def simulated(self, statistic: str) -> float:
        return fmean(draw[statistic] for draw in self.draws)

    def error(self, statistic: str) -> float:
        return self.simulated(statistic) / self.published[statistic] - 1

    def cells(self, statistic: str, bar: float | None = None) -> list[str]:
        """Return what was published, the mean of the draws with their range, the error, and what the bar says."""
        drawn = [draw[statistic] for draw in self.draws]
        low, high = (f"{end(drawn):,.0f}" for end in (min, max))
        mean = f"{self.simulated(statistic):,.0f}" + (f" ({low} to {high})" if low != high else "")
        if statistic not in self.published:
            return ["", mean, "", *([""] if bar else [])]
        verdict = [RIGHT if abs(self.error(statistic)) <= bar else WRONG] if bar else []
        return [f"{self.published[statistic]:,.0f}", mean, f"{self.error(statistic):+.0%}", *verdict]


def milliseconds(summary: Mapping[str, Any], front_s: float) -> dict[str, float]:
    """Return the statistics of a run as its client sees them, `front_s` away."""
    kept = {
        f"{metric} {name}": 1e3 * value
        for metric in ("ttft_s", "tpot_s", "itl_s", "e2e_s")
        for name, value in summary[metric].items()
        if name in ("mean", "std", "p50", "p95", "p99")
    }
    return {name: kept[name] + 1e3 * front_s * name.startswith(("ttft_s", "e2e_s")) for name in kept}


def run(scenarios: Mapping[str, Scenario], executor: Executor) -> dict[str, Any]:
    """Return the summary of each. Raises ScenarioError."""
    found = {}
    for made in executor.each(Task(key, each, "summary") for key, each in scenarios.items()):
        if made.reason:
            raise UserError(f"{made.key}: {made.reason}")
        print(f"  {made.key}", file=sys.stderr)
        found[made.key] = json.loads(made.files[SUMMARY])
    return found


# -- exp-7 -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bench:
    """A result of vllm bench: of servers apart or of replicas."""

    path: Path
    prefill: int
    decode: int
    replicas: int
    data: Mapping[str, Any]

    @property
    def label(self) -> str:
        return f"{self.replicas} replicas" if self.replicas else f"{self.prefill}P{self.decode}D"

    @property
    def load(self) -> tuple[int, int, float, float]:
        of = self.data
        count = of["num_prompts"]
        return (
            of["total_input_tokens"] // count,
            of["total_output_tokens"] // count,
            of["request_rate"],
            of["burstiness"],
        )

    def published(self) -> dict[str, float]:
        names = {"mean": "mean", "std": "std", "median": "p50", "p95": "p95", "p99": "p99"}
        return {
            f"{metric}_s {kept}": self.data[f"{name}_{metric}_ms"]
            for metric in ("ttft", "tpot", "itl")
            for name, kept in names.items()
        }

    def scenario(self, seed: int, *, chosen: bool, both: bool = False) -> Scenario:
        """Return the scenario of its servers; with `both` those apart do both parts, of any request."""
        of, (prompt, output, rate, burstiness) = SERVERS["pd"], self.load
        data = with_fields(of["scenario"], of["chosen"] if chosen else {})
        if not self.replicas:
            data["loop"] = data["loop"] | {"cuda_graphs": {"enabled": False}}
        pools: list[dict[str, Any]] = [{"count": self.replicas or self.prefill + self.decode}]
        fleet: dict[str, Any] = {"pools": pools, "router": of["router"]}
        if not self.replicas and not both:
            parts = (("prefill", self.prefill), ("decode", self.decode))
            fleet["pools"] = [{"name": name, "role": name, "count": count} for name, count in parts]
            fleet |= {"router": {"name": "least_in_flight"}, "hand_off": of["hand_off"]}
        data["workload"] = {
            "kind": "synthetic",
            "requests": self.data["num_prompts"],
            "prompt_tokens": round(of["longer"] * prompt),
            "output_tokens": output,
            "arrivals": {"kind": "gamma", "rate_per_s": rate, "burstiness": burstiness},
        }
        data |= {"name": "exp-7", "question": f"How near is {self.label}?", "seed": seed, "fleet": fleet}
        return scenario.parse(data, self.label)


def benches(folder: Path) -> list[Bench]:
    """Read the results in a folder, replicas first. Raises ScenarioError."""
    found = []
    for path in sorted(folder.glob("*.json")):
        if named := NAME.search(path.name):
            prefill, decode, replicas = (int(part or 0) for part in named.groups())
            found.append(Bench(path, prefill, decode, replicas, documents.read(path).data))
    if not found:
        raise UserError(f"{folder}: holds no result named as llm-d-1p1d__*.json or vllm-2replicas__*.json")
    return sorted(found, key=lambda each: not each.replicas)


def exp7(folder: Path, draws: int, executor: Executor) -> list[Seen]:
    """Return each result, predicted as described and with the chosen constant; apart also if servers do both parts."""
    scenarios, wanted = dict[str, Scenario](), list[tuple[str, Bench, str]]()
    for bench in benches(folder):
        ways = {"": {"chosen": False}, ", large_products chosen": {"chosen": True}}
        if not bench.replicas:
            ways |= {", if each server does both": {"chosen": True, "both": True}}
        for way, how in ways.items():
            key = f"{bench.label} {bench.load}{way}"
            wanted.append((key, bench, way))
            if f"{key} 0" not in scenarios:
                scenarios |= {f"{key} {seed}": bench.scenario(seed, **how) for seed in range(draws)}
    summaries, count = run(scenarios, executor), Counter[str]()
    seen = []
    for key, bench, way in wanted:
        count[key] += 1
        name = f"{bench.label}{f', run {count[key]}' if not bench.replicas else ''}{way}"
        drawn = [milliseconds(summaries[f"{key} {seed}"], SERVERS["pd"]["front_s"]) for seed in range(draws)]
        seen.append(Seen(name, bench.published(), drawn))
    return seen


def exp7_table(seen: Sequence[Seen]) -> Table:
    header = (
        "servers",
        *(f"{name}{cell}" for name in ("TTFT", "TPOT") for cell in (", ms", ": simulated", "", " 15%")),
    )
    rows = [(each.name, *each.cells("ttft_s mean", 0.15), *each.cells("tpot_s mean", 0.15)) for each in seen]
    return Table("exp-7, means", header, rows)


def stalls(seen: Sequence[Seen]) -> Table:
    names = ("ttft_s std", "itl_s p50", "itl_s p95", "itl_s p99")
    header = ("servers", *(f"{name}{cell}" for name in names for cell in (", published", ", simulated")))
    rows = [(each.name, *(cell for name in names for cell in each.cells(name)[:2])) for each in seen]
    return Table("exp-7, spread, ms", header, rows)


def winners(seen: Sequence[Seen]) -> Table:
    """Tabulate the means of servers apart over those of replicas."""
    rows, base = [], {each.name.partition(", ")[2]: each for each in seen if "replicas" in each.name}
    for each in seen:
        if "replicas" in each.name:
            continue
        beside = base["" if each.name.count(",") == 1 else "large_products chosen"]
        for metric, label in (("ttft_s mean", "TTFT"), ("tpot_s mean", "TPOT")):
            ratios = (
                each.published[metric] / beside.published[metric],
                each.simulated(metric) / beside.simulated(metric),
            )
            who = ["replicas" if ratio > 1 else "apart" for ratio in ratios]
            far = RIGHT if abs(ratios[1] / ratios[0] - 1) <= MEANS[0] else WRONG
            cells = (*(f"{ratio:.2f}" for ratio in ratios), *who, RIGHT if who[0] == who[1] else WRONG, far)
            rows.append((f"{each.name}: {label}", *cells))
    header = (
        "apart over replicas",
        "published",
        "simulated",
        "wins, published",
        "simulated",
        "who",
        "how much, 15%",
    )
    return Table("Who wins", header, rows)


# -- gpt-oss -----------------------------------------------------------------------------------------------------------


def gpt_oss(executor: Executor) -> list[Seen]:
    of, rows = SERVERS["gpt_oss"], defaultdict[str, dict[str, float]](dict)
    path = catalog.data(ROUTED, "servers of gpt-oss")
    with open_text(path) as file:
        table = CsvTable(path, file, COLUMNS)
        for group, arm, _, *cells in table.rows(None):
            name = f"{group} aggregated" if arm.startswith("aggregated") else group
            if name not in of["arms"] or name in rows:
                continue
            names = ("ttft_s mean", "ttft_s p95", "e2e_s mean", "tpot_s mean")
            rows[name] = {
                kept: table.number(at, cell) * scale
                for at, (kept, cell, scale) in enumerate(zip(names, cells, (*READ.values(), 1.0), strict=True), 3)
                if cell
            }
    scenarios = {}
    for name, fleet in of["arms"].items():
        data = copy.deepcopy(of["scenario"]) | {"name": "gpt-oss", "question": f"How near is {name}?", "fleet": fleet}
        if "hand_off" not in fleet:
            del data["scheduler"]["disable_hybrid_kv_cache_manager"]
        scenarios[name] = scenario.parse(data, name)
    found = run(scenarios, executor)
    return [Seen(name, rows[name], [milliseconds(found[name], of["front_s"])]) for name in scenarios]


def gpt_oss_table(seen: Sequence[Seen]) -> Table:
    names = {"ttft_s mean": "TTFT mean", "ttft_s p95": "TTFT p95"}
    also = {"tpot_s mean": "TPOT mean", "e2e_s mean": "E2E mean"}
    header = ["arm", *(f"{n}{c}" for n in names.values() for c in (", ms", ": simulated", "", " 25%"))]
    header += [f"{n}{c}" for n in also.values() for c in (", ms", ": simulated", "")]
    rows = [
        [s.name, *(c for n in names for c in s.cells(n, 0.25)), *(c for n in also for c in s.cells(n))] for s in seen
    ]
    return Table("gpt-oss-120b", header, rows)


# -- points ------------------------------------------------------------------------------------------------------------


def points(executor: Executor) -> tuple[list[score.Predicted], list[score.Refused]]:
    buildable, refused = score.sort(published.read(published.folder(None), {"mode": "disagg"}))
    buildable.sort(key=lambda each: -each.point.concurrency * each.point.prompt)
    found = []
    for built, means in zip(buildable, score.predict([each.scenario for each in buildable], executor), strict=True):
        if isinstance(means, str):
            refused.append(score.Refused(built.point, (means,)))
        else:
            found.append(score.predicted(built, means))
    return sorted(found, key=lambda each: (each.point.stratum, each.point.concurrency)), refused


def _verdict(each: score.Predicted, metric: str) -> str:
    bar = dict(zip(("ttft", "tpot"), POINTS, strict=True))[metric]
    return RIGHT if abs(each.error(metric)) <= bar else WRONG


def by_server(found: Sequence[score.Predicted]) -> Table:
    """Tabulate the errors by card, engine and model."""
    rows, groups = [], defaultdict[tuple[str, ...], list[score.Predicted]](list)
    for each in found:
        groups[each.point.system, each.point.backend, each.point.model_name].append(each)
    for name, part in [*groups.items(), (("all",), list(found))]:
        cells = [" ".join(name), f"{len(part)}"]
        for metric in ("tpot", "ttft"):
            errors = [each.error(metric) for each in part]
            within = sum(_verdict(each, metric) == RIGHT for each in part)
            cells += [f"{np.median(errors):+.0%}", f"{np.abs(errors).mean():.0%}", f"{within} of {len(part)}"]
        rows.append(cells)
    header = [f"{n}{c}" for n, b in (("TPOT", "15%"), ("TTFT", "30%")) for c in (": median", ", mean error", f", {b}")]
    return Table("Points", ["card, engine, model", "points", *header], rows)


def each_point(found: Sequence[score.Predicted]) -> Table:
    rows = []
    for each in found:
        cells = [f"{each.point.stratum}", f"{each.point.concurrency}"]
        for metric, value in zip(("ttft", "tpot"), each.means, strict=True):
            was = getattr(each.point, f"{metric}_ms")
            form = ",.0f" if metric == "ttft" else ".1f"
            cells += [format(was, form), format(value, form), f"{each.error(metric):+.0%}", _verdict(each, metric)]
        rows.append(cells)
    header = [f"{n}{c}" for n, b in (("TTFT", "30%"), ("TPOT", "15%")) for c in (", ms", ": simulated", "", f" {b}")]
    return Table("Each point", ["servers", "users", *header], rows)


def not_built(refused: Sequence[score.Refused]) -> Table:
    alone = Counter(each.reasons[0] for each in refused if len(each.reasons) == 1)
    counted = Counter(reason for each in refused for reason in each.reasons).most_common()
    rows = [(reason, f"{count}", f"{alone[reason]}") for reason, count in counted]
    return Table("Not built", ("reason", "points", "for no other reason"), rows)


# -- the report --------------------------------------------------------------------------------------------------------


Mark = tuple[str, float, float, bool, str]  # metric, published, simulated, whether that is right, label


def marks(logs: Sequence[Seen], arms: Sequence[Seen], found: Sequence[score.Predicted]) -> list[Mark]:
    """Return what the figure shows."""
    shown = list[Mark]()
    for at, metric in enumerate(("ttft", "tpot")):
        statistic = f"{metric}_s mean"
        for seen, bar in ((logs, MEANS[at]), (arms, GPT_OSS[at])):
            for each in seen:
                if "if each" in each.name or statistic not in each.published:
                    continue
                number = each.published[statistic], each.simulated(statistic), abs(each.error(statistic)) <= bar
                shown.append(
                    (metric, *number, each.name.replace(", large_products chosen", "*").replace(", run 1", ""))
                )
        for one in found:
            number = getattr(one.point, f"{metric}_ms"), one.means[at], _verdict(one, metric) == RIGHT
            shown.append((metric, *number, ""))
    return shown


def chart(shown: Sequence[Mark]) -> Chart:
    """Draw what is predicted over what was published, each marked right or wrong by its bar."""
    panels = []
    for metric in ("ttft", "tpot"):
        part, name = [mark for mark in shown if mark[0] == metric], metric.upper()
        ends = np.array([min(mark[1] for mark in part), max(mark[1] for mark in part)])
        lines: list[Line | Points] = [Line("equal", ends, ends, Style(GREY, "dashed"))]
        for number, right in enumerate((True, False)):
            of = [mark for mark in part if mark[3] is right]
            x, y = (np.array([mark[axis] for mark in of]) for axis in (1, 2))
            labels = ["" if "run 2" in mark[4] else mark[4] for mark in of]
            lines.append(Points("right" if right else "wrong", x, y, series(number), labels=labels))
        panels.append(Panel(lines, f"published {name}, ms", f"simulated {name}, ms", x_log=True, y_log=True, tall=True))
    caption = (
        "Means. Right: within 15 % (exp-7), 25 % (gpt-oss: d1 to d5), 30 % of TTFT and 15 % of TPOT (points of "
        "InferenceX, no label). With * a constant was chosen by the replicas' ITL."
    )
    return Chart("apart", "Prefill and decode apart: simulated over published", caption, panels, columns=2)


def main() -> None:
    parser = argparse.ArgumentParser(description="Simulate published servers whose prefill and decode are apart.")
    parser.add_argument("folder", nargs="?", type=Path, help="of vllm bench's results, named as llm-d's")
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    of = parser.parse_args()
    executor = Processes(of.jobs) if of.jobs > 1 else Here()
    try:
        if of.folder:
            made = exp7(of.folder, of.draws, executor)
            for each in (exp7_table, winners, stalls) if made else ():
                print(f"{each(made).title}\n{aligned([each(made).header, *each(made).rows])}\n")
            return
        logs = exp7(catalog.data(f"{PD}/README.md", "vllm bench's results").parent, of.draws, executor)
        arms, (found, refused) = gpt_oss(executor), points(executor)
    except UserError as error:
        sys.exit(print(f"{parser.prog}: {error}", file=sys.stderr) or USAGE)
    finally:
        executor.close()
    tables = {
        "means": exp7_table(logs),
        "winners": winners(logs),
        "stalls": stalls(logs),
        "gpt-oss": gpt_oss_table(arms),
        "points": by_server(found),
        "each-point": each_point(found),
        "not-built": not_built(refused),
    }
    shown = marks(logs, arms, found)
    data = {name: [table.header, *table.rows] for name, table in tables.items()}
    page.write(__file__, tables, [chart(shown)], data | {"marks": shown})


if __name__ == "__main__":
    main()
