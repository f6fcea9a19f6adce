"""What a run's documents must say for it to be analysed: summary.json, env.json and scenario.resolved.yaml.

Keys that nobody reads here may hold anything: a later version has more of them, and an engine has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from cbsim.results.checks import NAMES, SINGLE
from cbsim.results.directory import RunError
from cbsim.results.measures import DISTRIBUTIONS
from cbsim.results.terminal import lookup
from cbsim.scenario.fields import LARGEST_REAL, LARGEST_WHOLE, shown

AT_MOST_NAMED = 3  # things that are wrong with a document


class Kind(NamedTuple):
    """What a value has to be, in words and as a test. It may be missing or null unless it is `needed`.

    Nothing is needed inside of what is not there.
    """

    words: str
    fits: Callable[[Any], bool]
    needed: bool = True

    def complaint(self, value: Any) -> str | None:
        if value is None:
            return f"is missing or null, expected {self.words}" if self.needed else None
        return None if self.fits(value) else f"is {shown(value)}, expected {self.words}"


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST_WHOLE


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST_REAL


def _are_numbers(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_number, value.values()))


def _is_window(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(edge is None or _is_number(edge) for edge in value)


TEXT = Kind("text", lambda value: isinstance(value, str))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
WHOLE = Kind(f"a whole number from 0 to {LARGEST_WHOLE:,}", _is_whole)
NUMBER = Kind(f"a number up to {LARGEST_REAL:g}", _is_number)
AMOUNT = Kind(f"a number from 0 to {LARGEST_REAL:g}", lambda value: _is_number(value) and value >= 0)
NUMBERS = Kind(f"names with numbers up to {LARGEST_REAL:g}", _are_numbers)
FIELDS = Kind("fields", lambda value: isinstance(value, Mapping))
LIST = Kind("a list", lambda value: isinstance(value, list))
LOOP = Kind("sync or async", lambda value: value in ("sync", "async"))
WINDOW = Kind("a list of two numbers or nulls", _is_window)


def _optional(kind: Kind) -> Kind:
    return kind._replace(needed=False)


SUMMARY = (
    {metric: _optional(AMOUNT) for metric in NAMES}
    | {"makespan_s": AMOUNT, "gpu_active": AMOUNT, "preemptions": WHOLE}
    | {"name": TEXT, "question": TEXT, "loop": LOOP, "complete": FLAG, "percentile_method": TEXT, "total_blocks": WHOLE}
    | {"window_s": _optional(WINDOW), "requests": WHOLE, "steps": WHOLE, "requests_by_status": NUMBERS}
    | {metric: AMOUNT for metric in SINGLE if "." not in metric and metric.endswith("_per_s")}
    | dict.fromkeys(DISTRIBUTIONS, FIELDS)
    | {"step_time_s": _optional(FIELDS)}  # a run without a step has none
    | {f"{name}.n": WHOLE for name in DISTRIBUTIONS}
    | {f"{name}.too_few_for": _optional(LIST) for name in DISTRIBUTIONS}
    | {"slo": _optional(FIELDS), "cost": _optional(FIELDS), "cost.price_usd_hour": NUMBER}
)
ENVIRONMENT = (
    {"device": TEXT, "git": _optional(FIELDS), "packages": _optional(FIELDS), "injected_ms": _optional(NUMBERS)}
    | {name: _optional(TEXT) for name in ("command", "workload_hash", "engine", "git.commit")}
    | {"notes": _optional(LIST)}
)
SCENARIO = (
    {"name": TEXT, "loop.mode": LOOP, "scheduler.name": TEXT, "workload.kind": TEXT, "hardware.name": TEXT}
    | dict.fromkeys(("loop", "scheduler", "workload", "hardware", "cost"), FIELDS)
    | {"cost.kind": TEXT, "workload.arrivals": _optional(FIELDS), "workload.arrivals.kind": TEXT}
    | {f"cost.{name}_efficiency": _optional(NUMBERS) for name in ("compute", "memory")}
    | {f"scheduler.{name}": _optional(WHOLE) for name in ("max_num_batched_tokens", "max_batch_tokens")}
)


def check(file: object, document: Mapping[str, Any], declared: Mapping[str, Kind]) -> None:
    """Raises RunError naming the file, and each key, its value and what it has to be."""
    wrong = list(_complaints(document, declared))
    if wrong:
        more = [f"{len(wrong) - AT_MOST_NAMED} more"] if len(wrong) > AT_MOST_NAMED else []
        raise RunError(f"{file}: {'; '.join([*wrong[:AT_MOST_NAMED], *more])}")


def _complaints(document: Mapping[str, Any], declared: Mapping[str, Kind]) -> Iterator[str]:
    for key, kind in declared.items():
        inside = key.rpartition(".")[0]
        text = None if inside and lookup(document, inside) is None else kind.complaint(lookup(document, key))
        if text:
            yield f"{key} {text}"
