"""Pack the run directories of a validation folder into three Parquet files, which git keeps, and unpack them again.

    python reports/hardware/packed.py pack reports/hardware/cpu-modelled [CASE ...]
    python reports/hardware/packed.py unpack reports/hardware/cpu-modelled

runs.parquet has a row a run: its key, and its documents verbatim. steps.parquet and requests.parquet have a row a step
and a row a request of the runs that the report looks into, only of these CASEs if any are named. Each row begins with
case, loop, repeat and world. Times of a step are stored as differences from an earlier one (BEHIND), which halves their
size. Unpacked they are the original run directories, to the byte; a measured run without its tables has the outcome of
replanning in replay.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from analysis.statistics.loading import VERDICT, LoadedRun
from analysis.validation import cases
from cbsim.cli.arguments import Parser
from cbsim.errors import USAGE, ScenarioError, UserError
from cbsim.files import access
from cbsim.record import columns, directory, parquet
from cbsim.record.columns import Column

RUNS, STEPS, REQUESTS = FILES = ("runs.parquet", "steps.parquet", "requests.parquet")
DOCUMENTS = {"scenario": "scenario.resolved.yaml", "environment": "env.json", "summary": "summary.json"}
CPU_TIMES = [f"{phase}_{edge}_ns" for phase in columns.PHASES for edge in ("start", "end")]
DEVICE_TIMES = [f"{lane}_{edge}_ns" for lane in columns.LANES for edge in ("start", "end")]
BEHIND = {
    **{later: earlier for earlier, later in pairwise(CPU_TIMES)},
    **{later: earlier for earlier, later in pairwise(["launch_end_ns", *DEVICE_TIMES, "await_end_ns"])},
}
"""The time of a step that another one is kept behind: on the CPU the one before, on the device likewise."""
KEYS = (
    Column("case", "text", "the workload", "string"),
    Column("loop", "text", "`sync` or `async`", "string"),
    Column("repeat", "count", "1, 2 ...: which run of this case, loop and world"),
    Column("world", "text", "`measured` or `simulated`", "string"),
)
RUN_COLUMNS = (
    *KEYS,
    Column("folder", "text", "name of the run directory", "string"),
    Column("about", "text", "case.json of the case", "string"),
    *(Column(name, "text", f"{file} of the run", "string") for name, file in DOCUMENTS.items()),
    Column("replay", "text", f"{VERDICT} of a run whose tables are not kept, else null", "string", nullable=True),
)
STEP_COLUMNS = (
    *KEYS,
    *(
        column._replace(name=f"{column.name}_behind", definition=f"{column.definition}; less `{BEHIND[column.name]}`")
        if column.name in BEHIND
        else column
        for column in columns.STEPS
    ),
)
REQUEST_COLUMNS = (*KEYS, *columns.REQUESTS)
Key = tuple[str, str, int, str]


def pack(place: Path, names: Collection[str]) -> None:
    """Write the three files from place/validation, with the tables of these cases; of all, if none is named."""
    validation = cases.read(place)
    if unknown := sorted({*names} - {case.name for case in validation.cases}):
        raise ScenarioError(f"{place}: no case {', '.join(unknown)}")
    kept = [each for case in validation.cases for each in _of_case(case, whole=not names or case.name in names)]
    whole = [(key, run) for key, run, replay in kept if replay is None]
    documents: dict[str, Any] = {
        **_keys([(key, 1) for key, _, _ in kept]),
        "folder": [run.path.name for _, run, _ in kept],
        "about": [(run.path.parents[1] / "case.json").read_text() for _, run, _ in kept],
        **{name: [(run.path / file).read_text() for _, run, _ in kept] for name, file in DOCUMENTS.items()},
        "replay": [replay for _, _, replay in kept],
    }
    steps, requests = (pa.concat_tables([pq.read_table(run.path / name) for _, run in whole]) for name in FILES[1:])
    times = {f"{later}_behind": pc.subtract(steps[later], steps[earlier]) for later, earlier in BEHIND.items()}
    numbers = {column.name: "DELTA_BINARY_PACKED" for column in STEP_COLUMNS if column.type == "int64"}
    keys = _keys([(key, len(run.table)) for key, run in whole])
    _write(place / RUNS, RUN_COLUMNS, documents)
    _write(
        place / STEPS, STEP_COLUMNS, keys | _columns(steps) | times,
        use_dictionary=["case", "loop", "world"], column_encoding=numbers,
    )  # fmt: skip
    keys = _keys([(key, len(run.requests)) for key, run in whole])
    _write(place / REQUESTS, REQUEST_COLUMNS, keys | _columns(requests))
    print(f"packed    {len(kept)} runs, {len(whole)} with their tables")


def _of_case(case: cases.ValidationCase, *, whole: bool) -> Iterator[tuple[Key, LoadedRun, str | None]]:
    """Each run with null if its tables are kept, else with what its replay came to. Kept are, if those of the case
    are, the tables of the two runs of a loop that the report looks into.
    """
    for loop, pair in case.loops.items():
        for number, (run, replay) in enumerate(zip(pair.measured, case.replays[loop], strict=True), start=1):
            verdict = json.dumps({name: value for name, value in replay._asdict().items() if name != "run"})
            yield (case.name, loop, number, "measured"), run, None if _kept(run, pair.middle, whole) else verdict
        run = pair.simulated
        yield (case.name, loop, 1, "simulated"), run, None if _kept(run, run, whole) else "null"


def _kept(run: LoadedRun, shown: LoadedRun, whole: bool) -> bool:
    return whole and run.whole and run is shown


def _keys(counts: Sequence[tuple[Key, int]]) -> dict[str, Any]:
    """The columns that say which run a row is of."""
    return {column.name: [key[at] for key, count in counts for _ in range(count)] for at, column in enumerate(KEYS)}


def _columns(table: pa.Table) -> dict[str, Any]:
    return {name: table[name] for name in table.column_names}


def _write(file: Path, declared: Sequence[Column], values: Mapping[str, Any], **options: Any) -> None:
    file.write_bytes(parquet.encoded(declared, values, compression_level=19, **options))


def unpack(place: Path) -> None:
    """Write place/validation from the three files."""
    if (place / "validation").exists():
        raise ScenarioError(f"{place / 'validation'}: is there already; unpacking writes over nothing")
    runs, steps, requests = (_read(place / name) for name in FILES)
    for row in runs.to_pylist():
        case = place / "validation" / row["case"]
        run = case / row["world"] / row["folder"]
        run.mkdir(parents=True)
        (case / "case.json").write_text(row["about"])
        for name, file in DOCUMENTS.items():
            (run / file).write_text(row[name])
        if row["replay"] is not None:
            (run / VERDICT).write_text(row["replay"])
            continue
        own = _added_up(_rows(steps, row))
        (run / STEPS).write_bytes(parquet.encoded(columns.STEPS, own, **directory.COUNTERS))
        (run / REQUESTS).write_bytes(parquet.encoded(columns.REQUESTS, _columns(_rows(requests, row))))
    print(f"unpacked  {place / 'validation'}")


def _read(file: Path) -> pa.Table:
    with access(file):
        try:
            return pq.read_table(file)
        except pa.ArrowInvalid:
            raise ScenarioError(f"{file}: is not a Parquet file", file=file) from None


def _rows(table: pa.Table, row: Mapping[str, Any]) -> pa.Table:
    chosen = [pc.equal(table[column.name], row[column.name]) for column in KEYS]
    return table.filter(reduce(pc.and_, chosen)).combine_chunks()


def _added_up(table: pa.Table) -> dict[str, Any]:
    """The columns of a run's own table; each time behind one that is there before it."""
    made = {each.name: np.full(len(table), each.default) for each in columns.STEPS if each.default is not None}
    made |= _columns(table)
    for name in sorted(BEHIND, key=_depth):
        made[name] = pc.add(made[BEHIND[name]], made[f"{name}_behind"])
    return made


def _depth(name: str) -> int:
    return 1 + _depth(BEHIND[name]) if name in BEHIND else 0


def main(argv: Sequence[str] | None = None) -> None:
    """Pack or unpack a folder."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pack", "unpack"))
    parser.add_argument("folder", type=Path, help="holds validation/ or the three files")
    parser.add_argument("cases", nargs="*", help="whose steps and requests are kept (all)")
    arguments = parser.parse_args(argv)
    try:
        if arguments.what == "pack":
            pack(arguments.folder, arguments.cases)
        else:
            unpack(arguments.folder)
    except (UserError, OSError) as error:
        parser.exit(USAGE, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
