"""Lanes of the machine: each does one thing at a time, in the order in which it was asked.

A CUDA stream runs its work in order of submission, so the start of a piece of work is known when it is submitted: the
later of its dependencies and the end of the work before it. `Lane.book` is that sentence; no event is needed for it.
Times are integer nanoseconds since the start of the run.
"""

from __future__ import annotations


class Stream:
    """An order of execution. Lanes that share a stream never overlap."""

    def __init__(self) -> None:
        self.free_ns = 0


class Lane:
    """One engine of the machine: `h2d`, `compute`, `d2h`, `kv_in` or `kv_out`."""

    def __init__(self, name: str, stream: Stream) -> None:
        self.name = name
        self._stream = stream

    def start_ns(self, ready_ns: int) -> int:
        """When work submitted now, that may start at `ready_ns`, would start."""
        return max(ready_ns, self._stream.free_ns)

    def book(self, ready_ns: int, duration_ns: int) -> tuple[int, int]:
        """Submit work that may start at `ready_ns`; returns its start and end."""
        assert duration_ns >= 0, (self.name, duration_ns)
        stream = self._stream
        start = ready_ns if ready_ns > stream.free_ns else stream.free_ns
        stream.free_ns = end = start + duration_ns
        return start, end


class Slots:
    """The pinned I/O buffers of steps in flight. A slot is written again only after its last step's outputs are out."""

    def __init__(self, count: int) -> None:
        self._until_ns = [0] * count

    def free_ns(self, step: int) -> int:
        """When the slot of `step` may be written."""
        return self._until_ns[step % len(self._until_ns)]

    def hold(self, step: int, until_ns: int) -> None:
        """The slot of `step` is in use until then."""
        self._until_ns[step % len(self._until_ns)] = until_ns


def lanes(*, overlap: bool) -> tuple[Lane, Lane, Lane, Lane, Lane]:
    """(h2d, compute, d2h, kv_in, kv_out): a stream each, or one in-order stream for all when copies do not `overlap`
    compute. The last two move KV from and to the host, beside the small copies of every step.
    """
    shared = Stream()
    names = ("h2d", "compute", "d2h", "kv_in", "kv_out")
    h2d, compute, d2h, kv_in, kv_out = [Lane(name, Stream() if overlap else shared) for name in names]
    return h2d, compute, d2h, kv_in, kv_out
