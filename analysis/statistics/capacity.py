"""What `cbsim capacity --json` prints: loads that were probed, and the two that the capacity lies between."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cbsim.errors import RunError
from cbsim.metrics import checks
from cbsim.metrics.checks import Check

HOLDS, FAILS, UNDECIDED = VERDICTS = ("holds", "fails", "undecided")
ENDS = ("mean", "low", "high")


@dataclass(frozen=True, slots=True)
class Probe:
    """A load. `intervals` has (mean, low, high) of the metric of each condition, by its text; of a load that lost
    requests it may have none. `reason` is "" if there is nothing to say.
    """

    value: float
    verdict: str
    replicates: int
    requests: int
    intervals: Mapping[str, tuple[float, float, float]]
    reason: str


@dataclass(frozen=True, slots=True)
class Capacity:
    """`holds` is the last load that holds, `fails` the first that does not, None if none was tried that does. `binds`
    says why, in sentences. Probes by rising load.
    """

    path: Path
    name: str
    field: str
    holds: float | None
    fails: float | None
    confidence: float
    replicates: int
    requests: int
    conditions: Sequence[Check]
    binds: Sequence[str]
    monotone: bool
    notices: Sequence[str]
    probes: Sequence[Probe]


MOST_BYTES = 100_000_000


class WrongError(ValueError):
    """What is wrong with a field."""


def read(path: Path) -> Capacity:
    """The object in a file. Raises RunError, CheckError if it is no such object."""
    if path.exists() and not path.is_file():
        raise RunError(f"{path}: cannot be read: it is no file")
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise RunError(f"{path}: is too large, must be <= {MOST_BYTES:,} bytes")
        given = json.loads(content.decode("utf-8"))
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path}: not JSON: {error}") from None
    try:
        return _capacity(path, _an(given, dict, "the file"))
    except WrongError as error:
        raise RunError(f"{path}: not what `cbsim capacity --json` prints: {error}") from None


def _capacity(path: Path, given: Mapping[str, Any]) -> Capacity:
    texts = [_an(text, str, "conditions") for text in _an(given.get("conditions"), list, "conditions")]
    conditions = [checks.parse(text, f"{path}: conditions:") for text in texts]
    probes = [_probe(each, conditions) for each in _an(given.get("probes"), list, "probes")]
    if not conditions:
        raise WrongError("conditions: there is none")
    if not probes:
        raise WrongError("probes: there is none")
    name, loop = (str(given.get(key) or "") for key in ("name", "loop"))
    return Capacity(
        path=path,
        name=" ".join(filter(None, (name, loop))) or path.stem,
        field=_an(given.get("field"), str, "field"),
        holds=_or_none(given.get("holds"), "holds"),
        fails=_or_none(given.get("fails"), "fails"),
        confidence=_number(given.get("confidence"), "confidence"),
        replicates=_count(given, "replicates"),
        requests=_count(given, "requests"),
        conditions=conditions,
        binds=_sentences(given.get("binds")),
        monotone=given.get("monotone") is not False,
        notices=_sentences(given.get("notices")),
        probes=sorted(probes, key=lambda probe: probe.value),
    )


def _probe(given: Any, conditions: Sequence[Check]) -> Probe:
    fields = _an(given, dict, "probes")
    holds = fields.get("holds")
    if holds is not None and not isinstance(holds, bool):
        raise WrongError("probes: holds: expected true, false or null")
    verdict = fields.get("verdict", UNDECIDED if holds is None else HOLDS if holds else FAILS)
    if verdict not in VERDICTS:
        raise WrongError(f"probes: verdict: got {verdict!r}, expected one of {', '.join(VERDICTS)}")
    return Probe(
        value=_number(fields.get("value"), "probes: value"),
        verdict=verdict,
        replicates=_count(fields, "replicates"),
        requests=_count(fields, "requests"),
        intervals=_intervals(fields, conditions),
        reason=str(fields.get("reason") or ""),
    )


def _intervals(fields: Mapping[str, Any], conditions: Sequence[Check]) -> dict[str, tuple[float, float, float]]:
    """By condition: either a list whose entries name theirs, or by metric."""
    entries = [_an(entry, dict, "probes: values") for entry in _an(fields.get("values") or [], list, "probes: values")]
    listed = {str(entry.get("condition")): entry for entry in entries}
    given = listed or _an(fields.get("metrics") or {}, dict, "probes: metrics")
    made = {}
    for check in conditions:
        entry = given.get(check.rule) or given.get(check.metric)
        if isinstance(entry, dict):
            mean, low, high = (_number(entry.get(end), f"probes: {check.metric}: {end}") for end in ENDS)
            made[check.rule] = (mean, low, high)
    return made


def _sentences(given: Any) -> list[str]:
    if isinstance(given, dict):  # a word, and the sentences behind it
        return [str(given.get("word", "")), *map(str, given.get("sentences") or ())]
    return [str(text) for text in given] if isinstance(given, list) else [str(given)] if given else []


def _an(value: Any, kind: type[Any], name: str) -> Any:
    if not isinstance(value, kind):
        raise WrongError(f"{name}: expected {'an object' if kind is dict else 'a list' if kind is list else 'a text'}")
    return value


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise WrongError(f"{name}: expected a finite number")
    return float(value)


def _or_none(value: Any, name: str) -> float | None:
    return None if value is None else _number(value, name)


def _count(fields: Mapping[str, Any], name: str) -> int:
    return int(_or_none(fields.get(name), name) or 0)
