"""Checks that fail in every way, and the process that runs them: `faulty_checks.py OUT NAME,NAME FIRST`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from cbengine.first import smoke
from cbengine.first.smoke import CheckPlace, SmokeCheck


def good(place: CheckPlace) -> smoke.Found:
    return {"device": place.device, "share": 0.123456}


def bad(place: CheckPlace) -> smoke.Found:
    raise ValueError("wrong by a factor of 2")


def hangs(place: CheckPlace) -> smoke.Found:
    while True:
        pass


def crashes(place: CheckPlace) -> smoke.Found:
    os.abort()


def leaves(place: CheckPlace) -> smoke.Found:
    sys.exit("no more")


def breaks(place: CheckPlace) -> smoke.Found:
    smoke._context_is_broken = lambda _: True
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def elsewhere(place: CheckPlace) -> smoke.Found:
    place.only_on_gpu()
    return {}


hangs_long = hangs


def faulty(names: tuple[str, ...]) -> list[SmokeCheck]:
    return [SmokeCheck(name, 0.4 if name == "hangs" else 60, globals()[name]) for name in names]


if __name__ == "__main__":
    folder, names, first = sys.argv[1:]
    sys.exit(smoke.work(CheckPlace("cpu", Path(folder)), faulty(tuple(names.split(",")))[int(first) :]))
