"""Knobs as a command line says them: a field, and the values that are tried."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from cbsim.scenario import documents
from cbsim.scenario.documents import wording
from cbsim.scenario.fields import ScenarioError, cut
from cbsim.sweeps.axes import Ranged

FORM = "expected FIELD=A..B (doubling), FIELD=A..B:STEP, or FIELD=VALUE,VALUE"
NUMBER = r"[+-]?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?"
RANGE = re.compile(rf"({NUMBER})\.\.({NUMBER})(?::({NUMBER}))?")


def parse(texts: Sequence[str]) -> dict[str, Sequence[Any]]:
    """Fields and their values, from `FIELD=A..B`, `FIELD=A..B:STEP` or `FIELD=VALUE,VALUE`. Raises ScenarioError."""
    knobs: dict[str, Sequence[Any]] = {}
    for text in texts:
        name, equals, values = (part.strip() for part in text.partition("="))
        where = f"--knob {cut(text)}"
        if not (equals and name and values):
            raise ScenarioError(f"{where}: {FORM}", value=text, bound=FORM)
        if name in knobs:
            raise ScenarioError(f"{where}: {name} has another knob, expected one of them", field=name)
        knobs[name] = _values(name, values, where)
    return knobs


def _values(name: str, text: str, where: str) -> Sequence[Any]:
    span = RANGE.fullmatch(text)
    if span is None and ".." in text:
        raise ScenarioError(f"{where}: {FORM}", field=name, value=text, bound=FORM)
    if span is None:
        values = documents.parse(text if text[0] in "[{" else f"[{text}]", where, lines=False)
        values = values if isinstance(values, list) else [values]
        return list({repr(value): value for value in values}.values())
    try:
        low, high, step = (None if part is None else float(part) for part in span.groups())
        rule = {"log": {"low": low, "high": high, "factor": 2}}
        if step is not None:
            rule = {"range": {"low": low, "high": high, "step": step}}
        return Ranged.model_validate(rule).values()
    except ValidationError as error:
        entry: dict[str, Any] = dict(error.errors(include_url=False)[0])
        raise ScenarioError(f"{where}: {wording(entry)}", field=name, value=text) from None
    except ValueError:
        raise ScenarioError(f"{where}: {FORM}", field=name, value=text, bound=FORM) from None
