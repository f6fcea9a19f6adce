"""The two schedulers of transformers' continuous batching, each of either version."""

from __future__ import annotations

from cbsim.policy.kind import SchedulerKind
from cbsim.policy.schedulers.transformers import TransformersScheduler
from cbsim.policy.schedulers.transformers_523 import KindsOfLayers, Transformers523
from cbsim.policy.schedulers.transformers_settings import (
    FIFO,
    PREFILL_FIRST,
    TransformersOptions,
    TransformersSettings,
    reasons,
    resolve,
    settled,
    widened,
)


def make(options: TransformersOptions) -> TransformersScheduler:
    if options.version == "5.17":
        return TransformersScheduler(options)
    return KindsOfLayers(options) if options.groups else Transformers523(options)


def _kind(name: str, about: str) -> SchedulerKind[TransformersSettings, TransformersOptions]:
    return SchedulerKind(
        name=name,
        about=f"Hugging Face transformers 5.17, 5.23: {about}",
        settings=TransformersSettings,
        resolve=resolve,
        make=make,
        block_size=256,
        least_block_size=4,
        padding="transformers",
        windows=True,
        rings=True,
        settled=settled,
        widened=widened,
        reasons=reasons,
    )


TRANSFORMERS_FIFO = _kind(FIFO, "decoding requests first")
TRANSFORMERS_PREFILL_FIRST = _kind(PREFILL_FIRST, "split prefills first")
