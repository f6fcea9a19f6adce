"""A metric as figures and tables show it: what it is called, in which unit, and whether more of it is better."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import NamedTuple

from analysis.statistics import compare
from cbsim.draw.units import unit as unit_of_time
from cbsim.results import measures
from cbsim.results.terminal import shown

WORDS = {
    "output_tokens_per_s_per_gpu": "output tokens/s per GPU",
    "output_tokens_per_s_per_user": "output tokens/s per user",
    "slo.goodput_requests_per_s": "goodput, requests/s",
    "kv_utilisation.max": "KV used, most",
    "waiting.mean": "requests waiting, mean",
    "bubble_s": "compute idle",
    "cost.usd_per_million_tokens": "$ a million tokens",
}
STATISTICS = {"mean": "mean", "std": "standard deviation", "min": "least", "max": "most", "n": "samples"}
RATE = re.compile(r"_per_s(_|$)")
MORE = ("gpu_active", "slo.met", "slo.attainment", "prefix_hit_tokens", "prefix_hit_rate")


class Scale(NamedTuple):
    """What an axis shows: values divided by `size`, named by `name`, which may be ""."""

    name: str
    size: float


@dataclass(frozen=True, slots=True)
class Quantity:
    """A metric of a sweep's table. `unit` as `cbsim.results.terminal.shown` wants it."""

    metric: str
    label: str
    unit: str
    more_is_better: bool

    def text(self, value: float) -> str:
        """A mean of it; "-" if there is none."""
        if math.isnan(value):
            return "-"
        if self.unit == "count":
            return f"{value:,.0f}" if value == round(value) or abs(value) >= 1e5 else f"{value:,.5g}"
        return shown(value, self.unit)

    def scale(self, most: float) -> Scale:
        """In which values up to `most` are read easily."""
        if self.unit == "s":
            return Scale(*unit_of_time(most))
        return Scale("%", 0.01) if self.unit.endswith("share") else Scale("", 1.0)


def quantity(metric: str) -> Quantity:
    """The metric of that dotted name."""
    return Quantity(metric, _label(metric), _unit(metric), RATE.search(metric) is not None or metric in MORE)


def _unit(metric: str) -> str:
    if RATE.search(metric):
        return "number"
    return "share" if measures.unit(metric) == "share" else compare.unit(metric)


def _label(metric: str) -> str:
    head, _, statistic = metric.partition(".")
    if metric in WORDS:
        return WORDS[metric]
    if head in measures.DISTRIBUTIONS and statistic in STATISTICS:
        word = compare.WORDS.get(head, head.removesuffix("_s").replace("_", " "))
        return f"{word}, {STATISTICS[statistic]}"
    return re.sub(r" per s$", "/s", compare.label(metric))
