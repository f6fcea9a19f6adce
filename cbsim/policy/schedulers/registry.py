"""The one place where schedulers are found by name, and what each is in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cbsim.policy.loop import Scheduler
from cbsim.policy.schedulers.static import StaticScheduler
from cbsim.policy.schedulers.transformers import TransformersScheduler
from cbsim.policy.schedulers.vllm import VllmScheduler

SCHEDULERS: dict[str, tuple[Callable[[Any], Scheduler], str]] = {
    "static": (StaticScheduler, "batched generation: padded, nobody is admitted until the last of the batch has ended"),
    "transformers_fifo": (TransformersScheduler, "Hugging Face transformers 5.17: decoding requests first"),
    "transformers_prefill_first": (TransformersScheduler, "Hugging Face transformers 5.17: split prefills first"),
    "vllm": (VllmScheduler, "vLLM V1 (0.33; 0.19 by option): running first, preemption by recompute"),
}
