"""YAML of bounded size: a short text cannot become many values, nor a deep one, whatever its aliases expand to."""

from __future__ import annotations

from typing import Any

from ruamel.yaml.composer import Composer, ComposerError
from ruamel.yaml.constructor import ConstructorError, SafeConstructor
from ruamel.yaml.events import AliasEvent

from cbsim.scenario.fields import shown

MOST_BYTES = 500_000
"""Of a file."""
MOST_VALUES = 12_000
"""Keys and values of a file, its aliases written out; a text counts as one more for every 100 characters."""
MOST_DEPTH = 40
"""Values inside each other."""
TAGS = {"str", "int", "float", "bool", "null", "seq", "map", "timestamp", "merge"}
NAMES = {"int": "a whole number of at most 4,300 digits", "float": "a number", "bool": "true or false"}


class BoundedComposer(Composer):
    """Counts values and their depth while it reads, an alias as what it stands for."""

    def __init__(self, loader: Any = None) -> None:
        super().__init__(loader=loader)
        self.warn_double_anchors = False
        self._values = self._level = self._deepest = 0
        self._anchored: dict[str, tuple[int, int]] = {}  # values in what an anchor names, levels below it

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.parser.peek_event()
        before, deepest, anchor = self._values, self._deepest, event.anchor
        is_alias = isinstance(event, AliasEvent)
        if is_alias and anchor in self.anchors and anchor not in self._anchored:
            raise ComposerError(None, None, f"*{anchor} stands inside of what it names", event.start_mark)
        text = getattr(event, "value", "") or ""
        values, levels = self._anchored.get(anchor, (0, 0)) if is_alias else (1 + len(text) // 100, 0)
        self._level += 1
        self._values, self._deepest = before + values, self._level + levels
        self._check(event.start_mark)
        if anchor is not None and not is_alias:
            self._anchored.pop(anchor, None)  # a name may be given again
        node = super().compose_node(parent, index)
        if anchor is not None and not is_alias:
            self._anchored[anchor] = (self._values - before, self._deepest - self._level)
        self._level, self._deepest = self._level - 1, max(deepest, self._deepest)
        return node

    def _check(self, mark: Any) -> None:
        if self._values > MOST_VALUES:
            text = f"holds too many values, must be <= {MOST_VALUES:,}, aliases written out"
            raise ComposerError(None, None, text, mark)
        if self._deepest > MOST_DEPTH:
            raise ComposerError(None, None, f"nested too deeply, must be <= {MOST_DEPTH} levels", mark)


class PlainConstructor(SafeConstructor):
    """Makes plain values only, and knows the line of one that cannot be made."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        tag = str(node.tag)
        kind = tag.rpartition(":")[2]
        if kind not in TAGS:
            raise ConstructorError(None, None, f"tag {tag} is not known here, expected plain values", node.start_mark)
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, TypeError, ArithmeticError):
            text = f"got {shown(node.value)}, expected {NAMES.get(kind, kind)}"
            raise ConstructorError(None, None, text, node.start_mark) from None
