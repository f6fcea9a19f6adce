"""What SGLang 0.5.23 does that its authors did not mean, put back for the comparison with its traces."""

from __future__ import annotations

from cbsim.policy.request import RequestSpec
from cbsim.policy.schedulers.sglang import SglangScheduler
from cbsim.policy.schedulers.sglang_prefill import Finishing, Prefill
from cbsim.policy.schedulers.sglang_queue import Entry


class DefectivePrefill(Prefill):
    """Who ends after all others is put before the last of them."""

    def behind(self, line: list[Finishing]) -> int:
        return max(0, len(line) - 1)


class DefectiveSglang(SglangScheduler):
    """The rules of SGLang as they are, faults included."""

    def make_prefill(self) -> DefectivePrefill:
        return DefectivePrefill(self.options, self.ratio, self.batch, self.most)

    def refusal(self, spec: RequestSpec) -> None:  # noqa: ARG002  (a prompt that is too long is replaced and run)
        return None

    def asked(self, entry: Entry) -> int:
        """What was last found out: nothing, before it was looked at for admission."""
        return entry.todo

    def stranded(self, entry: Entry) -> list[Entry]:
        """The last one that decodes is given up for good."""
        self.leave(entry.request)
        self._give_up(entry.request)
        return []
