"""Paths that a system can look up. Standard library only: the command lines ask before anything heavy is imported."""

from __future__ import annotations

PATH_BOUND = "a path has at most 1,000 characters, each name in it at most 255 bytes"


def too_long(path: str) -> bool:
    """Is it a path that no system can look up?"""
    return len(path) > 1000 or any(len(name.encode("utf-8", "replace")) > 255 for name in path.split("/"))
