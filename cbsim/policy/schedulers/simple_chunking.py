"""Simple chunking: prompts are read in chunks, in steps of their own, which take turns with steps that decode.

One of Sarathi-Serve's baselines: chunks alone, without decoding beside them.
"""

from __future__ import annotations

from typing import Final

from cbsim.policy.kind import SchedulerKind
from cbsim.policy.request import Request
from cbsim.policy.schedulers.sarathi_serve import SarathiServe, Step
from cbsim.policy.schedulers.sarathi_settings import (
    SimpleChunkingOptions,
    SimpleChunkingSettings,
    reasons,
    resolve_simple_chunking,
    widened_chunks,
)


class SimpleChunking:
    """`decodes`: it is the turn of those who decode."""

    grows: Final = True

    def __init__(self, options: SimpleChunkingOptions) -> None:
        self._size = options.chunk_size
        self.decodes = False

    def choose(self, serve: SarathiServe, step: Step) -> None:
        if not self.decodes:
            self._read(serve, step)
            if step.prompts or step.taken:
                self.decodes = True
                return
        serve.decode(step)
        step.again = step.again or self.decodes
        self.decodes = False

    def _read(self, serve: SarathiServe, step: Step) -> None:
        """Prompts half read go on, or else the queue is let in."""
        for begun in serve.unread():
            tokens = self._chunk(serve, begun, step)
            if tokens:
                serve.read(begun, tokens, step)
        if step.prompts:
            return
        while request := serve.head(step):
            tokens = self._chunk(serve, request, step)
            if not tokens:
                break
            serve.admit(request, tokens, step)

    def _chunk(self, serve: SarathiServe, request: Request, step: Step) -> int:
        return min(serve.left(request), self._size - step.tokens)


def make(options: SimpleChunkingOptions) -> SarathiServe:
    return SarathiServe(options, SimpleChunking(options))


SIMPLE_CHUNKING = SchedulerKind(
    name="simple_chunking",
    about="simple chunking (Sarathi-Serve's): steps of prompt chunks and steps that decode, by turns",
    settings=SimpleChunkingSettings,
    resolve=resolve_simple_chunking,
    make=make,
    widened=widened_chunks,
    reasons=reasons,
)
