"""What `client` does. Arguments come in parsed; a number goes out, the exit status."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from analysis.cli import writing
from analysis.clients import reading
from analysis.clients.beside import beside
from analysis.page import client_report
from analysis.statistics import loading
from cbsim.draw import folder
from cbsim.results.terminal import aligned


def client(path: Path, files: Sequence[Path], out: Path | None, *, as_json: bool) -> int:
    """Say what clients measured beside what their server did."""
    if out is not None:
        folder.check(out)
    (run,) = loading.read([path])
    compared = [beside(run, reading.client(file)) for file in files]
    if out is not None:
        words = ["python", "-m", "analysis", "client", path, *files, "--out", out]
        writing.write(client_report.build(run, compared, shlex.join(map(str, words))), out, quiet=as_json)
    if as_json:
        print(json.dumps(client_report.facts(run, compared), indent=2, allow_nan=False))
        return 0
    for each in compared:
        for table in client_report.tables(each):
            says = f"{writing.wrapped(table.says)}\n" if table.says else ""
            print(f"{table.title}\n{says}\n{aligned([list(table.header), *map(list, table.rows)])}\n")
        for sentence in client_report.findings(each):
            print(writing.wrapped(sentence))
    caveats = client_report.caveats(run, compared)
    if caveats:
        print("\nwhen not to trust this:")
    for caveat in caveats:
        print(writing.wrapped(f"{caveat.run}: {caveat.text}", "  - ", "    "))
    return 0
