"""SGLang's scheduler, as the rest of the project knows it."""

from __future__ import annotations

from cbsim.policy.kind import SchedulerKind
from cbsim.policy.schedulers.sglang import SglangScheduler
from cbsim.policy.schedulers.sglang_settings import SglangSettings, reasons, resolve, settled, widened

SGLANG = SchedulerKind(
    name="sglang",
    about="SGLang 0.5.23: prefill before decode, a radix tree, retraction",
    settings=SglangSettings,
    resolve=resolve,
    make=SglangScheduler,
    block_size=1,
    padding="none",
    settled=settled,
    widened=widened,
    reasons=reasons,
)
