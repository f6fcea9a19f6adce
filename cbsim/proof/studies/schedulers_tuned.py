"""Each scheduler at its best: the settings that `tune` finds for goodput under the SLO, at one rate.

The knobs are what a scheduler has of seats and token budgets, and for those that reserve a whole sequence its length:
the workload has none beyond LONGEST.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from cbsim.sweeps import identity, means, paired, tune
from cbsim.sweeps.executor import Here
from cbsim.sweeps.metric import Metric, named
from cbsim.sweeps.racing import Goal
from cbsim.sweeps.store import Store
from cbsim.sweeps.tune import Runs

SCENARIO, LONGEST = "rates", 4096 + 2048
CONFIDENCE, MOST = 0.95, 10
KNOBS: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "static": {"batch_size": (32, 128)},
    "faster_transformer": {"max_num_seqs": (128, 256), "max_model_len": (LONGEST,)},
    "orca": {"max_num_seqs": (128, 256), "max_model_len": (LONGEST,)},
    "vllm_v0": {"max_num_seqs": (256, 512), "max_batched_tokens": (LONGEST, 16384)},
    "sarathi": {"max_num_seqs": (128, 256, 512), "chunk_size": (256, 512, 1024, 2048)},
    "tgi": {"max_batch_size": (256, 512), "max_batch_prefill_tokens": (4096, 8192), "waiting_served_ratio": (0.3, 1.2)},
    "transformers_fifo": {"max_batch_tokens": (512, 1024, 2048, 4096, 8192), "max_requests_per_batch": (256, 1024)},
    "trtllm": {"max_num_tokens": (512, 1024, 2048, 4096, 8192), "enable_chunked_prefill": (True,)},
    "vllm": {"max_num_seqs": (128, 256, 512), "max_num_batched_tokens": (512, 1024, 2048, 4096, 8192)},
    "sglang": {"chunked_prefill_size": (512, 1024, 2048, 4096, 8192), "enable_mixed_chunk": (False, True)},
}
GOODPUT, ATTAINMENT = named("goodput", ""), named("attainment", "")


class Best(NamedTuple):
    """A scheduler's best settings beside its defaults: mean goodput of both, over the same replicates; the interval of
    their difference, which holds whichever candidate is the best (Bonferroni); how many candidates there were, and how
    many could not be told from the best.
    """

    scheduler: str
    settings: Mapping[str, Any]
    default: float
    tuned: float
    low: float
    high: float
    attainment: float
    replicates: int
    candidates: int
    left: int


def changes(scheduler: Mapping[str, Any], loop: str, requests: int, rate: float) -> list[str]:
    """The overrides of the scenario that are a scheduler with its settings, at a rate."""
    return [
        f"scheduler={json.dumps(scheduler)}",
        f"loop.mode={loop}",
        f"workload.requests={requests}",
        f"workload.arrivals.rate_per_s={rate}",
    ]


def best(name: str, loop: str, requests: int, rate: float) -> Best:
    """Tune a scheduler; its defaults get as many replicates as its best settings have."""
    given = changes({"name": name}, loop, requests, rate)
    goal = Goal(Metric(GOODPUT, 1), (), CONFIDENCE, MOST)
    knobs = {f"scheduler.{field}": values for field, values in KNOBS[name].items()}
    candidates = tune.candidates(SCENARIO, given, knobs, goal)
    with tempfile.TemporaryDirectory() as folder:
        found = tune.tune(candidates, goal, Path(folder), Here())
        place = found.outcome.best
        assert place is not None
        trial = found.outcome.trials[place]
        usual = Runs(tune.candidates(SCENARIO, given, {}, goal), Store(Path(folder), identity.code()), Here())
        (runs,) = usual.measure([0], range(len(trial.runs))).values()
    defaults = [run[GOODPUT] for run in runs if not isinstance(run, str)]
    confidence = means.each(CONFIDENCE, len(candidates))  # of all against the defaults: the best one was chosen
    compared = paired.paired(dict(enumerate(trial.values(GOODPUT))), dict(enumerate(defaults)), confidence)
    assert compared is not None
    return Best(
        name,
        {field.rpartition(".")[2]: value for field, value in found.settings(place).items()},
        compared.second,
        compared.first,
        compared.low,
        compared.high,
        fmean(trial.values(ATTAINMENT)),
        compared.pairs,
        len(candidates),
        len(found.outcome.left),
    )
