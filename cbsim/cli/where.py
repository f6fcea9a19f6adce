"""`--where FIELD=VALUE,...`: which rows of others' measurements are meant."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any


def where_argument(parser: argparse.ArgumentParser, about: str) -> None:
    """Values by field; none by default."""
    parser.add_argument("--where", type=_values, action=_Joined, default={}, metavar="FIELD=VALUE,...", help=about)


def where_words(where: Mapping[str, str]) -> list[str]:
    """The same, to be given again."""
    return ["--where", ",".join(f"{field}={value}" for field, value in where.items())] if where else []


class _Joined(argparse.Action):
    """Given several times, all hold."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: Any) -> None:
        before = getattr(namespace, self.dest)
        twice = sorted(before.keys() & values.keys())
        if twice:
            parser.error(f"argument --where: {twice[0]} is given twice")
        setattr(namespace, self.dest, before | values)


def _values(text: str) -> dict[str, str]:
    chosen: dict[str, str] = {}
    for part in text.split(","):
        field, equal, value = (word.strip() for word in part.partition("="))
        if not (equal and field) or field in chosen:
            raise argparse.ArgumentTypeError(f"{text!r}: expected FIELD=VALUE,FIELD=VALUE, each field once")
        chosen[field] = value
    return chosen
