"""Stop strings, found in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class Stops:
    """The text ends at the stop string that ends first; of two that end together, the longer one counts. What may be
    the beginning of a stop string is withheld. `hit` is the one that was found.
    """

    __slots__ = ("_held", "_include", "_least", "_stops", "hit")

    def __init__(self, stops: Sequence[str], include: bool, min_tokens: int = 0) -> None:
        self._stops, self._include, self._least = tuple(stops), include, min_tokens
        self._held = ""
        self.hit: str | None = None

    def feed(self, text: str, tokens: int) -> tuple[str, bool]:
        """What may be told now, and whether a stop string ends it. The first `min_tokens` tokens stop nothing."""
        if tokens <= self._least:
            return text, False
        text = self._held + text
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            end, start = min(ends)
            self._held, self.hit = "", text[start:end]
            return text[: end if self._include else start], True
        keep = max(_beginning(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def rest(self) -> str:
        """What was withheld of a text that has ended otherwise."""
        held, self._held = self._held, ""
        return held


def _beginning(text: str, stop: str) -> int:
    """Characters at the end of `text`, which does not contain `stop`, that `stop` begins with."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at = text.find(stop[0], at + 1)
    return 0
