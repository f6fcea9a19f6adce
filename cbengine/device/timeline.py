"""What the events of a GPU measure, told in the host's time."""

from __future__ import annotations

from collections.abc import Sequence

from cbengine.device.base import Lanes


class Timeline:
    """When a step's copies and kernels ran, on the host's clock.

    Events say how far apart things happened, not when, and the two clocks drift. What ties them is that a step's first
    copy begins after its launch has, and that its last one is over before the host knows. The mapping is moved when it
    would break that, by no more than it takes, so it is never wrong by more than launching and waking up take. What the
    drift within a step has then left out of order is clipped.
    """

    def __init__(self, anchor_ns: int, *, overlap: bool) -> None:
        """The first edges are counted from `anchor_ns`."""
        self._anchor_ns, self._overlap = anchor_ns, overlap
        self._last = Lanes(*[anchor_ns] * 6)

    def at(self, edge: int) -> int:
        """When something happened, by an event so many nanoseconds behind the H2D copy of the step placed last; it may
        have been long before that.
        """
        return self._anchor_ns + edge

    def place(self, edges: Sequence[int], launched_ns: int, awaited_ns: int) -> Lanes:
        """Nanoseconds since the H2D copy of the step before began, an event that is near and before all others, become
        times: start and end of this step's H2D copy, of its kernels, end of its D2H copy. In order of launch.
        """
        at = [self._anchor_ns + edge for edge in edges]
        shift = max(launched_ns - at[0], 0) or min(awaited_ns - at[-1], 0)
        self._anchor_ns = at[0] + shift
        last = self._last

        def clipped(ns: int, *after: int) -> int:
            return max(min(ns + shift, awaited_ns), *after)

        h2d_start = clipped(at[0], launched_ns, last.h2d_end_ns if self._overlap else last.d2h_end_ns)
        h2d_end = clipped(at[1], h2d_start)
        start = clipped(at[2], h2d_end, last.compute_end_ns)
        end = clipped(at[3], start)
        d2h_start = max(end, last.d2h_end_ns)
        self._last = Lanes(h2d_start, h2d_end, start, end, d2h_start, clipped(at[4], d2h_start))
        return self._last
