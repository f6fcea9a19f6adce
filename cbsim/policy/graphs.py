"""Shapes that CUDA graphs are captured for, and the one that a step is padded to."""

from __future__ import annotations


def up_to_multiple(value: int, interval: int, most: int) -> int:
    """`value` rounded up to a multiple of `interval`, at least one interval, at most `most`."""
    return min(max(interval, -(-value // interval) * interval), most)


def up_to_power(value: int, most: int) -> int:
    """`value` rounded up to a power of two, at most `most`."""
    return min(1 << max(0, value - 1).bit_length(), most)
