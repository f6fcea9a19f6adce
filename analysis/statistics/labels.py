"""The labels of runs: the fields that distinguish them, and no more."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from os.path import commonprefix
from typing import Any

from cbsim.metrics.terminal import flat

Facts = Mapping[str, Any]  # a run's fields of its scenario by dotted name, its loop, its world

IN_FRONT = ("scheduler.name", "model.name", "hardware.name")  # first in a label whenever they differ
BEHIND = ("loop.mode", "world")  # last in a label whenever they differ
IGNORED = ("question",)
LAST_RESORT = ("seed", "cost.cpu.")
MOST_LETTERS = 60  # of a label


def labels(facts: Sequence[Facts], otherwise: Sequence[str]) -> list[str]:
    """Return a label for each run, `otherwise` if nothing distinguishes it. Runs that are alike are numbered.

    A number stands alone behind a name if a label has but one; else it has the name of its field.
    """
    fields = _fields(facts := _by_item(facts))
    made = [_label(run, fields, facts, bare=True) for run in facts]
    distinct = len({tuple(repr(run.get(field)) for field in fields) for run in facts})
    named = not fields or fields[0] in ("name", *IN_FRONT)
    several = any(sum(is_number(run.get(field)) for field in fields) > 1 for run in facts)
    if not named or several or len(set(made)) < distinct:
        made = [_label(run, fields, facts, bare=False) for run in facts]
    return shortened([label or other for label, other in zip(made, otherwise, strict=True)])


def _by_item(facts: Sequence[Facts]) -> list[Facts]:
    """Return the facts with `pools.0.count` and so on in place of `pools`, if that has as many objects in all runs."""
    counts = {field: {_objects(run.get(field)) for run in facts} for one in facts[:1] for field in one}
    items = [(field, at) for field, of in counts.items() if len(of) == 1 for at in range(*of)]
    return [{**run, **dict.fromkeys(dict(items)), **flat({f"{f}.{i}": run[f][i] for f, i in items})} for run in facts]


def _objects(value: Any) -> int:
    """Return the number of objects of which a value is a list, 0 if it is none."""
    return len(value) if isinstance(value, list) and all(isinstance(each, Mapping) for each in value) else 0


def _fields(facts: Sequence[Facts]) -> list[str]:
    """Return the fields in labels: scheduler, model, GPU, loop and world if they differ; of the rest, one after the
    other, the one that distinguishes most runs, until all runs that differ are distinguished.
    """
    known = {field: None for run in facts for field in run if field not in IGNORED}
    columns = {field: [repr(run.get(field)) for run in facts] for field in known}
    differing = {field: column for field, column in columns.items() if len(set(column)) > 1}
    front, behind = ([field for field in fields if field in differing] for fields in (IN_FRONT, BEHIND))
    own = _distinguishing({field: differing.pop(field) for field in (*front, *behind)}, differing, facts)
    return [*(["name"] * ("name" in own)), *front, *(field for field in own if field != "name"), *behind]


def _distinguishing(
    always: Mapping[str, list[str]], columns: Mapping[str, list[str]], facts: Sequence[Facts]
) -> list[str]:
    """Return the fields of `columns` that, chosen one after the other, distinguish what those of `always` do not."""
    classes: list[Any] = list(zip(*always.values(), strict=True)) or [()] * len(facts)
    chosen: list[str] = []
    while True:
        sizes = {field: len({*zip(classes, column, strict=True)}) for field, column in columns.items()}
        useful = [field for field, size in sizes.items() if size > len({*classes})]
        if not useful:
            return chosen
        chosen.append(min(useful, key=lambda f: (f.startswith(LAST_RESORT), -sizes[f], _kind(f, facts))))
        classes = list(zip(classes, columns[chosen[-1]], strict=True))


def _kind(field: str, facts: Sequence[Facts]) -> int:
    """Return the rank among fields that distinguish as many runs: names come first, then numbers."""
    values = [run[field] for run in facts if run.get(field) is not None]
    if field.rpartition(".")[2] == "name":
        return 0
    if all(map(is_number, values)):
        return 1
    return 2 if all(isinstance(value, str) for value in values) else 3


def is_number(value: Any) -> bool:
    """Whether a value is a number and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _label(run: Facts, fields: Sequence[str], facts: Sequence[Facts], *, bare: bool) -> str:
    return " ".join(filter(None, (_part(field, run.get(field), facts, bare=bare) for field in fields)))


def _part(field: str, value: Any, facts: Sequence[Facts], *, bare: bool) -> str:
    """Return a value alone if it is clear without its field, else `field=value`; if `bare`, null is "". A part without
    a name is not there.
    """
    rest = {other for each in facts for other in each} - {field}
    if isinstance(value, str):
        return value.rpartition("/")[2]
    if value is None and (bare or field.endswith(".name")):
        return "" if bare else f"no {ending(field, rest).removesuffix('.name')}"
    if bare and is_number(value) and not field.startswith(LAST_RESORT):
        return worded(value)
    return f"{ending(field, rest)}={worded(value)}"


def worded(value: Any) -> str:
    """Return a value as labels have it: as JSON, but of objects only what they set, after the number of several."""
    if isinstance(value, Mapping):
        return " ".join(f"{key} {worded(each)}" for key, each in value.items() if each is not None)
    if isinstance(value, list) and (count := _objects(value)) == len(value):
        return f"{count}: " * (count > 1) + "; ".join(map(worded, value)) if value else "none"
    return value if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else json.dumps(value)


def ending(name: str, rest: Collection[str]) -> str:
    """Return the shortest end of a dotted name with which none of the rest ends."""
    parts = name.split(".")
    ends = (".".join(parts[-count:]) for count in range(1, len(parts)))
    return next((end for end in ends if not any(f".{other}".endswith(f".{end}") for other in rest)), name)


def shortened(names: Sequence[str], most: int = MOST_LETTERS) -> list[str]:
    """Return the names in `most` letters, numbered where they are alike. What distinguishes one from those most like it
    stays: a name that begins like another is cut in its middle.
    """
    ordered, made, start = sorted({*names}), [], most // 4
    for whole in names:
        at, name = bisect_left(ordered, whole), whole
        similar = (other for other in ordered[max(at - 1, 0) : at + 2] if other != whole)
        alike = max((len(commonprefix((whole, other))) for other in similar), default=0)  # noqa: RUF071  # letters
        if len(name) > most and alike > most - start:
            fields = (name.rfind(mark, alike - start, alike) + 2 for mark in (", ", "; "))
            name = f"{name[:start]}...{name[max(alike - start, *fields) :]}"
        made.append(name if len(name) <= most else f"{name[: most - 3]}...")
    return numbered(made)


def numbered(names: Sequence[str]) -> list[str]:
    """Append #2 to the second occurrence of a name, and so on."""
    return [f"{name} #{n}" if (n := names[: i + 1].count(name)) > 1 else name for i, name in enumerate(names)]
