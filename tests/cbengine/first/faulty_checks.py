"""Checks that fail in every way, and the process that runs them: `faulty_checks.py OUT NAME,NAME FIRST`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from cbengine.first import smoke
from cbengine.first.smoke import Check, Place


def good(place: Place) -> smoke.Found:
    return {"device": place.device, "share": 0.123456}


def bad(place: Place) -> smoke.Found:
    raise ValueError("wrong by a factor of 2")


def hangs(place: Place) -> smoke.Found:
    while True:
        pass


def crashes(place: Place) -> smoke.Found:
    os.abort()


def leaves(place: Place) -> smoke.Found:
    sys.exit("no more")


def breaks(place: Place) -> smoke.Found:
    smoke._context_is_broken = lambda _: True
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def elsewhere(place: Place) -> smoke.Found:
    place.only_on_gpu()
    return {}


hangs_long = hangs


def faulty(names: tuple[str, ...]) -> list[Check]:
    return [Check(name, 0.4 if name == "hangs" else 60, globals()[name]) for name in names]


if __name__ == "__main__":
    folder, names, first = sys.argv[1:]
    sys.exit(smoke.work(Place("cpu", Path(folder)), faulty(tuple(names.split(",")))[int(first) :]))
