"""What runs are called: by what sets them apart, and by no more."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Facts = Mapping[str, Any]  # of a run: the fields of its scenario by dotted name, the loop it had, its world

IN_FRONT = ("scheduler.name", "model.name", "hardware.name")  # told whenever they differ
BEHIND = ("loop.mode", "world")  # likewise
UNTOLD = ("question",)
LAST_RESORT = ("seed", "cost.cpu.")


def labels(facts: Sequence[Facts], otherwise: Sequence[str]) -> list[str]:
    """A label for each run, `otherwise` if nothing sets it apart. Runs that are alike are numbered.

    A number stands alone behind a name if a label has but one; else it has the name of its field.
    """
    told = _told(facts)
    made = [_label(run, told, facts, bare=True) for run in facts]
    distinct = len({tuple(repr(run.get(field)) for field in told) for run in facts})
    named = not told or told[0] == "name" or told[0] in IN_FRONT
    if not named or len(set(made)) < distinct or any(_numbers(run, told) > 1 for run in facts):
        made = [_label(run, told, facts, bare=False) for run in facts]
    return _numbered([words or other for words, other in zip(made, otherwise, strict=True)])


def _told(facts: Sequence[Facts]) -> list[str]:
    """The fields that labels tell: scheduler, model, GPU, loop and world if they differ; of all others, one after the
    other, the one that tells most runs apart, until all that differ are told apart.
    """
    fields = {field: None for run in facts for field in run if field not in UNTOLD}
    apart = {field: column for field in fields if len(set(column := [repr(run.get(field)) for run in facts])) > 1}
    front, behind = ([field for field in where if field in apart] for where in (IN_FRONT, BEHIND))
    classes = list(zip(*(apart[field] for field in (*front, *behind)), strict=True)) or [()] * len(facts)
    rest = [field for field in apart if field not in (*front, *behind)]
    chosen: list[str] = []
    while rest:
        split = {field: len({*zip(classes, apart[field], strict=True)}) for field in rest}
        rest = [field for field in rest if split[field] > len({*classes})]
        if rest:
            best = min(rest, key=lambda field: (field.startswith(LAST_RESORT), -split[field], _kind(field, facts)))
            chosen.append(best)
            classes = list(zip(classes, apart[best], strict=True))
    own = [field for field in chosen if field == "name"]
    return [*own, *front, *(field for field in chosen if field != "name"), *behind]


def _kind(field: str, facts: Sequence[Facts]) -> int:
    """Of fields that tell as many runs apart, names say most, then numbers."""
    values = [run[field] for run in facts if run.get(field) is not None]
    if field.rpartition(".")[2] == "name":
        return 0
    if all(map(_is_number, values)):
        return 1
    return 2 if all(isinstance(value, str) for value in values) else 3


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers(run: Facts, told: Sequence[str]) -> int:
    return sum(_is_number(run.get(field)) for field in told)


def _label(run: Facts, told: Sequence[str], facts: Sequence[Facts], *, bare: bool) -> str:
    return " ".join(filter(None, (_word(field, run.get(field), facts, bare=bare) for field in told)))


def _word(field: str, value: Any, facts: Sequence[Facts], *, bare: bool) -> str:
    """A value that says by itself what it is, else `field=value`; `bare`, null says nothing."""
    if isinstance(value, str):
        return value.rpartition("/")[2]
    if bare and value is None:
        return ""
    text = f"{value:g}" if isinstance(value, float) else json.dumps(value)
    return (
        text if bare and _is_number(value) and not field.startswith(LAST_RESORT) else f"{_short(field, facts)}={text}"
    )


def _short(field: str, facts: Sequence[Facts]) -> str:
    """As much of a field's name, from its end, as no other field has."""
    parts = field.split(".")
    others = {other for run in facts for other in run} - {field}
    ends = (".".join(parts[-n:]) for n in range(1, len(parts) + 1))
    return next((end for end in ends if not any(f".{other}".endswith(f".{end}") for other in others)), field)


def _numbered(words: Sequence[str]) -> list[str]:
    """The second of a name is its #2."""
    return [f"{word} #{n}" if (n := words[: i + 1].count(word)) > 1 else word for i, word in enumerate(words)]
