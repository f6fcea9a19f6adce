"""FasterTransformer: a batch is let in, runs until its last request has ended, and nobody is let in meanwhile.

As Sarathi-Serve's baseline has it: the longest sequence is reserved for each, nothing is padded, and the row of a
request that has ended is not computed on. `static` is a padded batch.
"""

from __future__ import annotations

from typing import Final

from cbsim.policy.kind import SchedulerKind
from cbsim.policy.schedulers.sarathi_serve import SarathiServe, Step
from cbsim.policy.schedulers.sarathi_settings import (
    FasterTransformerOptions,
    FasterTransformerSettings,
    reasons,
    resolve_faster_transformer,
    widened,
)


class FasterTransformer:
    """A batch decodes, or the next one is let in. With stages, while batches are in flight another one is."""

    grows: Final = False

    def choose(self, serve: SarathiServe, step: Step) -> None:
        serve.decode(step)
        if not step.empty or (serve.running and not serve.staged):
            return
        while request := serve.head(step):
            serve.admit(request, serve.left(request), step)


def make(options: FasterTransformerOptions) -> SarathiServe:
    return SarathiServe(options, FasterTransformer())


FASTER_TRANSFORMER = SchedulerKind(
    name="faster_transformer",
    about="FasterTransformer (Sarathi-Serve's): nobody is admitted until the last of the batch has ended, unpadded",
    settings=FasterTransformerSettings,
    resolve=resolve_faster_transformer,
    make=make,
    widened=widened,
    reasons=reasons,
)
