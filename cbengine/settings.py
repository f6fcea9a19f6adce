"""Sampling settings of single requests, and the file that gives them: JSON Lines, one request a line.

A line has the `id` of a request and any of `temperature`, `top_k`, `top_p`, `seed`; what it leaves out is the run's.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from cbengine.errors import UsageError
from cbengine.sampling import Sampling
from cbsim.policy.request import RequestSpec
from cbsim.scenario import rows
from cbsim.scenario.fields import near, shown
from cbsim.scenario.rows import JsonLine

FILE = "sampling.jsonl"  # name of the file in a run directory
FIELDS = tuple(setting.name for setting in fields(Sampling))


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """Sampling settings of single requests, by request id; the other requests have the run's settings. Further samples
    of a request have that one's, or their own.

    `path` and `lines` locate each in its file.
    """

    by_id: Mapping[str, Sampling] = field(default_factory=dict, hash=False)
    path: Path | None = None
    lines: Mapping[str, int] = field(default_factory=dict, hash=False)

    def of(self, spec: RequestSpec, usual: Sampling) -> Sampling:
        if self.by_id and spec.sample_of is not None:
            usual = self.of(spec.sample_of, usual)
        return self.by_id.get(spec.id, usual)

    @property
    def facts(self) -> dict[str, Any]:
        """The entries of env.json."""
        return {"file": str(self.path) if self.path else None, "requests": len(self.by_id)}

    def check(self, specs: Collection[RequestSpec]) -> None:
        """Raise UsageError for an id that no request has."""
        known = {spec.id for spec in specs}
        for name in self.by_id:
            if name not in known:
                expected = f"expected the id of one of the {len(known)} requests{near(name, sorted(known))}"
                source = f"{self.path}:{self.lines[name]}" if self.path else "sampling"
                raise UsageError(f"{source}: id: got {shown(name)}, {expected}")

    def file(self) -> bytes:
        """Return all settings with every field, in the form that `read` takes."""
        lines = ({"id": name, **asdict(sampling)} for name, sampling in self.by_id.items())
        return "".join(f"{json.dumps(line)}\n" for line in lines).encode()


def read(path: Path, usual: Sampling) -> SamplingSettings:
    """Read the settings of a file; `usual` has the fields that lines leave out. Raises ScenarioError, UsageError."""
    by_id: dict[str, Sampling] = {}
    lines: dict[str, int] = {}
    with rows.open_text(path) as file:
        for line in rows.lines(path, file):
            name = line.values.get("id")
            if not isinstance(name, str):
                raise line.bad("id", "the id of a request, a text")
            if name in by_id:
                raise line.bad("id", f"another id: line {lines[name]} has that")
            by_id[name] = _sampling(line, usual)
            lines[name] = line.number
    return SamplingSettings(by_id, path, lines)


def _sampling(line: JsonLine, usual: Sampling) -> Sampling:
    values = {name: value for name, value in line.values.items() if name != "id"}
    for name in values:
        if name not in FIELDS:
            known = f"{', '.join(('id', *FIELDS[:-1]))} or {FIELDS[-1]}"
            raise UsageError(f"{line.path}:{line.number}: {name}: is unknown, expected {known}{near(name, FIELDS)}")
    try:
        return replace(usual, **values)
    except UsageError as error:
        raise UsageError(f"{line.path}:{line.number}: {str(error).removeprefix('sampling.')}") from None
