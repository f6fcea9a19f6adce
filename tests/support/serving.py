"""`cbsim serve` in a process of its own."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.calls import started


class Session:
    """A server in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        out = process.stdout.readline()
        where = re.search(r"http://127\.0\.0\.1:\d+/v1", out)
        assert where, out or process.communicate()[1]
        self.address = where[0]

    def openai(self) -> Any:
        from openai import OpenAI

        return OpenAI(base_url=self.address, api_key="key", max_retries=0)

    def end(self, *signals: int) -> tuple[int, str, str]:
        for number in signals:
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


@contextmanager
def serving(out: Path, *words: object, **more: str) -> Iterator[Session]:
    """Serve tiny_cpu on any port; `more` are variables of its environment."""
    words = ("tiny_cpu", "--port", 0, "--out", out, *words)
    with started("cbsim", "serve", *words, **more) as process:
        yield Session(process)
