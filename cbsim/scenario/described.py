"""What the strings below a class's fields say of them: read from its source when a schema is made, and not before."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Any


@cache
def documented(described: Any) -> Mapping[str, str]:
    """The docstring under each field of a class and of those it inherits; none where its source is not at hand."""
    texts: dict[str, str] = {}
    for part in reversed(described.__mro__):
        try:
            (body,) = ast.parse(textwrap.dedent(inspect.getsource(part))).body
        except (OSError, TypeError, SyntaxError, ValueError):
            continue
        statements = getattr(body, "body", [])
        for field, text in pairwise(statements):
            match field, text:
                case (ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words)))):
                    texts[name] = inspect.cleandoc(words)
    return texts
