"""The requests of a recorded workload of SGLang's."""

from __future__ import annotations

from typing import Any

from cbsim.policy.request import RequestSpec
from cbsim.workload.scheduler_tests import STOP_TOKEN, ChainedKeys

Line = dict[str, Any]


class Asked:
    """A request of a workload: what it says, and how it went."""

    def __init__(self, index: int, given: Line, too_long: int, keys: ChainedKeys) -> None:
        self.id: str = given["id"]
        self.arrival: int = given["arrival_step"]
        self.cancel: int | None = given.get("cancel_step")
        self.max_new: int = given["max_new_tokens"]
        self.whole: bool = given.get("ignore_eos", False)
        self.prompt_tokens = len(given["prompt"])
        self.too_long = self.prompt_tokens >= too_long
        prompt, output = [0] if self.too_long else given["prompt"], given["output"]
        if not self.whole and STOP_TOKEN in output:
            output = output[: output.index(STOP_TOKEN) + 1]
        self.stops = not self.whole and STOP_TOKEN in output
        self.outputs: list[int] = output
        words = [*prompt, *output]
        most = max(1, self.max_new)
        self.spec = RequestSpec(
            index,
            self.id,
            self.arrival,
            len(prompt),
            min(most, max(1, len(output))) if self.stops else most,
            most,
            given.get("priority", 0) or 0,
            keys.of(words),
            1,
            len(words),
        )
        self.stats: Line = {"first_step": None, "end_step": None, "reason": None, "n_out": 0}
        self.stats |= {"retractions": 0, "wasted": 0}

    def over(self, step: int, reason: str, outputs: int) -> None:
        self.stats |= {"end_step": step, "reason": reason, "n_out": outputs}
