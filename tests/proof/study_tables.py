"""The generated tables of docs/studies.md, from reports/fidelity."""

from __future__ import annotations

from fidelity_tables import cases, errors, facts, largest, title

from cbsim.draw.markdown import Table
from cbsim.proof.studies import fragmentation


def ablation_table() -> Table:
    """A part of the model a row; of recorded runs that were replayed without it."""
    header = ["replayed with"]
    columns: list[dict[str, list[str]]] = []
    for name in cases():
        ablation = facts(name).get("ablation")
        if ablation:
            header += [f"{title(name)}: TTFT", "TPOT", "E2E", "largest"]
            columns.append({each["name"]: _cells(errors(each["errors"])) for each in ablation})
    return Table("", header, _joined(columns))


def _cells(found: dict[tuple[str, str], float]) -> list[str]:
    means = [f"{100 * found[metric, 'mean']:+.1f}" for metric in ("ttft", "tpot", "e2e")]
    return [*means, f"{100 * largest(found):.1f}"]


def scheduler_table() -> Table:
    header = ["policy, cost model"]
    columns: list[dict[str, list[str]]] = []
    answers = facts("schedulers")["answers"]
    for name in cases():
        cells = {}
        for each in answers:
            if each["run"] == name:
                found = {(score[0], score[1]): score[-1] for score in each["scores"]}
                means = [f"{100 * found[metric, 'mean']:+.1f} %" for metric in ("ttft", "tpot", "e2e")]
                cells[f"{each['policy']}, {each['cost']}"] = [*means, str(each["preemptions"])]
        if cells:
            header += [f"{title(name)}: TTFT", "TPOT", "E2E", "preemptions"]
            columns.append(cells)
    return Table("", header, _joined(columns))


def _joined(columns: list[dict[str, list[str]]]) -> list[tuple[str, ...]]:
    """Rows of all columns by what stands first in them; empty where a column has no such row."""
    names = dict.fromkeys(name for column in columns for name in column)
    return [(name, *(cell for column in columns for cell in column.get(name, [""] * 4))) for name in names]


def fragmentation_table() -> Table:
    header = ("percent of the KV memory (published)", "token states", "reserved for later", "never used", "all others")
    rows = []
    for each in facts("fragmentation")["runs"]:
        if each["assumption"] == fragmentation.PAPER:
            held, later, never, *others = each["shares"].values()
            cells = zip((held, later, never, sum(others)), fragmentation.PUBLISHED[each["system"]], strict=True)
            shown = (f"{100 * share:.1f}" + ("" if said is None else f" ({said})") for share, said in cells)
            rows.append((each["system"], *shown))
    return Table("", header, rows)


def assumption_table() -> Table:
    held: dict[str, dict[str, str]] = {}
    for each in facts("fragmentation")["runs"]:
        held.setdefault(each["assumption"], {})[each["system"]] = f"{100 * each['shares']['held']:.1f}"
        if each["assumption"] == fragmentation.RATE:
            batched = f"{each['running']:.2f} ({fragmentation.BATCHED[each['system']]:.2f})"
            held.setdefault(f"requests that run, at {fragmentation.RATE}", {})[each["system"]] = batched
    systems = tuple(fragmentation.SYSTEMS)
    rows = [(name, *(cells.get(system, "") for system in systems)) for name, cells in held.items()]
    return Table("", ("assumption", *systems), rows)
