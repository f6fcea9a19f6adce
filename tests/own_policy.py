"""The policies of docs/your_own_policy.md as they stand there: texts, and the module that a user would import."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

PAGE = Path(__file__).parents[1] / "docs" / "your_own_policy.md"
TEXT, EAGER = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def module() -> ModuleType:
    """What `import shortest` gives."""
    made = ModuleType("own_policy_as_printed")
    sys.modules[made.__name__] = made  # where a dataclass looks for its module
    exec(TEXT, made.__dict__)
    return made
