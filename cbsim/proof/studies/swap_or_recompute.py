"""Swap or recompute: from which context and which host link on a preempted request should keep its KV.

The closed form of swap_terms.py beside the simulator: two requests of which one has to give way, where nothing else
differs, and batches under pressure, where the two rules also order the work differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from cbsim.draw.chart import BLACK, Chart, Line, Mark, Panel, Points, Style, series
from cbsim.draw.markdown import Table
from cbsim.draw.study import Study
from cbsim.machine import simulate
from cbsim.proof.recorded.ablation import NO_CPU
from cbsim.proof.studies.swap_terms import ONE_WAY, Terms
from cbsim.results.columns import NS
from cbsim.results.metrics import Steps
from cbsim.results.moves import summarise
from cbsim.scenario import shapes
from cbsim.scenario.scenario import Scenario
from cbsim.workload import generators

MODELS = ("llama-3.1-8b", "llama-2-7b", "qwen2.5-32b", "llama-3.2-1b")
GPUS = ("h100-sxm", "a100-80gb", "l4")
MODEL, GPU = "llama-3.1-8b", "h100-sxm"
SIZE = 16  # tokens in a block
GB = 1e9
LINKS = (4 * GB, 8 * GB, 10 * GB, 12 * GB, 16 * GB, 32 * GB, 64 * GB)
PROMPTS = (256, 1024, 4096, 16384)
LENGTHS = (256, 1024, 8192, 32768)
GROWN = 32  # tokens that each of the pair generates before the cache is full
OUTPUTS = 64
GRAPHS = 512  # query tokens of the largest CUDA graph
MOST = 1000.0  # GB/s: what no host link reaches
MODES = ("swap", "recompute")
LOADS = ((512, 1024, 96), (2048, 2048, 48), (8192, 4096, 24))  # prompt, outputs, requests
HELD = 4  # whole requests that the cache of a batch holds
LOAD_LINKS = (4 * GB, 8 * GB, 12 * GB, 16 * GB, 64 * GB)
ASSUMED = (
    "Assumed: the roofline at its default efficiencies, 60 % of the peak FLOP/s in prefills, and a link that reaches "
    "the rate named. Copies reach less than a data sheet's rate: V0 copied keys and values block by block and layer by "
    "layer, here in pieces of 32 KiB. CPU time is left out, and so is the prefix cache, in which a recomputed request "
    "may find its own blocks."
)


def study() -> Study:
    """Closed forms of several models and GPUs, pairs of requests, batches."""
    pairs = [Pair.of(prompt, link) for prompt, link in product(PROMPTS, LINKS)]
    loads = [Load.of(*load, link) for load in LOADS for link in LOAD_LINKS]
    return Study(
        "Swap or recompute",
        "From which context on, and over which link, does a preempted request cost less if its KV waits on the host "
        "than if it is computed again?",
        [_finding_closed(), _finding_pairs(pairs), _finding_loads(loads), ASSUMED],
        [_table_closed(), _table_pairs(pairs), _table_loads(loads)],
        [_chart(pairs), _chart_loads(loads)],
        {
            "pairs": [pair._asdict() | {"closed_s": pair.closed_s, "saved_s": pair.saved_s} for pair in pairs],
            "loads": [load._asdict() | {"gain": load.gain, "closed": load.closed} for load in loads],
        },
    )


def scenario(model: str = MODEL, gpu: str = GPU, link: float | None = None, **parts: Any) -> Scenario:
    """A model on a GPU, perhaps behind another link, by the roofline and without CPU time."""
    hardware = shapes.hardware(gpu)
    if link is not None:
        hardware = hardware.model_copy(update={"pcie_bytes_s": link})
    workload = {"kind": "synthetic", "requests": 1, "prompt_tokens": 1, "output_tokens": 1}
    usual = {"question": "Swap or recompute?", "model": model, "hardware": hardware, "workload": workload}
    return Scenario.model_validate({**usual, "cost": {"kind": "roofline", "cpu": NO_CPU}, **parts})


class Ran(NamedTuple):
    """One simulated run."""

    seconds: float
    preemptions: int
    recomputed: int
    moved: int  # blocks, there and back

    @classmethod
    def of(cls, link: float, mode: str, workload: tuple[int, int, int], tokens: int, budget: int) -> Ran:
        """`workload`: prompt, outputs, requests, all at once. The cache holds `tokens`, a step computes `budget`."""
        prompt, outputs, requests = workload
        rules = {"preemption_mode": mode, "swap_space_gib": 1024, "enable_prefix_caching": False}
        asked = scenario(
            link=link,
            workload={"kind": "synthetic", "requests": requests, "prompt_tokens": prompt, "output_tokens": outputs},
            scheduler={"name": "vllm", "max_num_batched_tokens": budget, **rules},
            kv_cache={"num_blocks": 1 + tokens // SIZE, "block_size": SIZE},
            loop={"mode": "sync"},
        )
        server = simulate.machine(asked, "sync", generators.build(asked))
        simulate.run(server)
        steps, moves = Steps.of(server.record), summarise(server.record.moves, 0.0)
        return cls(
            server.now_ns / NS,
            int(steps["preempted"].sum()),
            int(steps["recomputed_tokens"].sum()),
            moves["out_blocks"] + moves["in_blocks"],
        )


class Pair(NamedTuple):
    """Two requests of `tokens - GROWN` prompt tokens fill the cache. The second gives way with `tokens` computed, and
    goes on alone when the first has ended: seconds of the run under both rules.
    """

    tokens: int
    link: float
    swap_s: float
    recompute_s: float

    @classmethod
    def of(cls, prompt: int, link: float) -> Pair:
        room = 2 * (prompt + GROWN)
        both = [Ran.of(link, mode, (prompt, OUTPUTS, 2), room, 2 * prompt) for mode in MODES]
        assert [ran.preemptions for ran in both] == [1, 1], both
        return cls(prompt + GROWN, link, *(ran.seconds for ran in both))

    @property
    def saved_s(self) -> float:
        """What swapping saves."""
        return self.recompute_s - self.swap_s

    @property
    def closed_s(self) -> float:
        """The same by the closed form."""
        terms = Terms.of(scenario())
        return terms.extra_s(self.tokens) - terms.moved_s(self.tokens, self.link)


class Load(NamedTuple):
    """A batch whose cache holds `HELD` whole requests, under both rules."""

    prompt: int
    outputs: int
    requests: int
    link: float
    swap: Ran
    recompute: Ran

    @classmethod
    def of(cls, prompt: int, outputs: int, requests: int, link: float) -> Load:
        room = HELD * (prompt + outputs)
        both = [Ran.of(link, mode, (prompt, outputs, requests), room, 8192) for mode in MODES]
        return cls(prompt, outputs, requests, link, *both)

    @property
    def gain(self) -> float:
        """Share of the time that swapping saves."""
        return 1 - self.swap.seconds / self.recompute.seconds

    @property
    def context(self) -> int:
        """Tokens that a recomputed request had lost, on the mean."""
        return round(self.recompute.recomputed / max(1, self.recompute.preemptions))

    @property
    def closed(self) -> float:
        """The same share by the closed form: what the one computed again, less what the other moved."""
        terms = Terms.of(scenario())
        again_s = self.recompute.preemptions * terms.extra_s(self.context, HELD - 1)
        moved_s = terms.moved_s(self.swap.moved * SIZE, self.link, ONE_WAY)
        return (again_s - moved_s) / self.recompute.seconds


# -- in words ---------------------------------------------------------------------------------------------------------


def _finding_closed() -> str:
    terms, own = Terms.of(scenario()), scenario().hardware.pcie_bytes_s
    rates = ", ".join(f"{terms.link_bytes_s(n) / GB:.1f} GB/s at {n:,} tokens" for n in LENGTHS[1:])
    return (
        f"{MODEL} on {GPU}: over its link of {own / GB:.0f} GB/s swapping pays from {terms.tokens(own):,.0f} tokens "
        "on. Below, a step reads the weights anyway and the tokens are computed meanwhile. The link from which it pays "
        f"is {rates}. If one of the ways goes on beside the steps, half of that does."
    )


def _finding_pairs(pairs: Sequence[Pair]) -> str:
    worst, long = (
        max(abs(pair.saved_s - pair.closed_s) for pair in pairs if pair.tokens >= least) for least in (0, GRAPHS)
    )
    right = sum((pair.saved_s > 0) == (pair.closed_s > 0) for pair in pairs)
    return (
        f"Two requests, one preempted: in {right} of {len(pairs)} runs the rule that the closed form names is the "
        f"faster one, and what it saves is off by at most {worst * 1e3:.2f} ms; by {long * 1e3:.2f} ms where the chunk "
        f"is not padded to the size of a CUDA graph, which goes up to {GRAPHS} tokens."
    )


def _finding_loads(loads: Sequence[Load]) -> str:
    said = []
    for prompt, outputs in dict.fromkeys((load.prompt, load.outputs) for load in loads):
        of = [load for load in loads if (load.prompt, load.outputs) == (prompt, outputs)]
        pays = [load.link for load in of if load.gain > 0]
        least = f"from {min(pays) / GB:.0f} GB/s on" if pays else "at none of the links"
        said.append(
            f"prompts of {prompt:,} with {outputs:,} outputs {least}, with {of[-1].swap.preemptions} preemptions "
            f"against {of[-1].recompute.preemptions}, {of[-1].gain:+.1%} at {of[-1].link / GB:.0f} GB/s"
        )
    order = [100 * (load.gain - load.closed) for load in loads]
    return (
        f"Batches whose cache holds {HELD} whole requests, over the links tried: swapping is faster for "
        f"{'; '.join(said)}. Moves and tokens computed again leave {min(order):+.1f} to {max(order):+.1f} points of "
        "the time unexplained, as much as is gained or lost. That is the order of work: the two rules let others in at "
        "different times."
    )


# -- tables -----------------------------------------------------------------------------------------------------------


def _table_closed() -> Table:
    rows = []
    for model, gpu in product(MODELS, GPUS):
        asked = scenario(model, gpu)
        terms, own = Terms.of(asked), asked.hardware.pcie_bytes_s
        links = [terms.link_bytes_s(tokens) / GB for tokens in LENGTHS]
        shown = [f"{link:.1f}" if link < MOST else f"> {MOST:,.0f}" for link in links]
        lengths = [f"{terms.tokens(own):,.0f}", f"{terms.tokens(own / 4):,.0f}"]
        rows.append([model, gpu, f"{terms.kv_bytes / 1024:.0f} KiB", f"{own / GB:.0f}", *lengths, *shown])
    header = ["model", "GPU", "KV a token", "link, GB/s", "tokens from which", "at a quarter of it"]
    return Table(
        "Closed form: contexts, and links in GB/s, from which on swapping pays",
        [*header, *(f"link at {tokens:,}" for tokens in LENGTHS)],
        rows,
        "The victim's row alone in its step; the GPU waits for both ways.",
    )


def _table_pairs(pairs: Sequence[Pair]) -> Table:
    rows = [
        [
            f"{pair.tokens:,}",
            f"{pair.link / GB:.0f}",
            *(f"{1e3 * value:+.2f}" for value in (pair.saved_s, pair.closed_s)),
        ]
        for pair in pairs
    ]
    header = ["tokens", "link, GB/s", "swapping saves, ms", "closed form"]
    says = (
        "Simulated, in order with the steps. A chunk of 289 tokens is padded to a CUDA graph of 304, which the closed "
        "form leaves out."
    )
    return Table(f"Two requests on {GPU}, one preempted once", header, rows, says)


def _table_loads(loads: Sequence[Load]) -> Table:
    rows = [
        [
            f"{load.prompt:,} + {load.outputs:,}",
            f"{load.link / GB:.0f}",
            *(f"{ran.seconds:.2f}" for ran in (load.swap, load.recompute)),
            f"{load.gain:+.1%}",
            f"{load.closed:+.1%}",
            f"{load.swap.preemptions}, {load.recompute.preemptions}",
            f"{load.swap.moved:,}",
            f"{load.recompute.recomputed:,}",
        ]
        for load in loads
    ]
    header = ["prompt + outputs", "link, GB/s", "swap, s", "recompute, s", "saved", "closed form"]
    counts = ", ".join(dict.fromkeys(f"{load.requests} of {load.prompt:,}" for load in loads))
    return Table(
        f"Batches on {GPU}",
        [*header, "preemptions", "blocks", "tokens"],
        rows,
        f"All requests at once ({counts}), a cache for {HELD} whole ones, 8,192 query tokens a step. Preemptions with "
        "swapping, with recomputing; blocks moved there and back; tokens computed again.",
    )


# -- figures ----------------------------------------------------------------------------------------------------------


def _chart(pairs: Sequence[Pair]) -> Chart:
    links = np.geomspace(3 * GB, 80 * GB, 120)
    marks: list[Mark] = []
    for index, (others, name) in enumerate(((0, "alone in its step"), (1000, "beside 1,000 tokens"))):
        terms = Terms.of(scenario())
        context = np.array([max(1.0, terms.tokens(link, others)) for link in links])
        marks.append(Line(name, links / GB, context, series(index)))
    for name, won, marker in (("swapping was faster", True, "circle"), ("recomputing was faster", False, "cross")):
        of = [pair for pair in pairs if (pair.saved_s > 0) == won]
        x, y = (np.array(values, dtype=float) for values in ([p.link / GB for p in of], [p.tokens for p in of]))
        marks.append(Points(name, x, y, Style(BLACK, "solid", marker)))
    panel = Panel(marks, "link, GB/s", "tokens computed", x_log=True, y_log=True)
    says = (
        f"{MODEL} on {GPU}. Above a line swapping costs less GPU time, by the closed form: for a row alone in its "
        "step, and beside others whose arithmetic already takes longer than reading the weights. Points: pairs of "
        "requests, simulated."
    )
    return Chart("swap-or-recompute", "From where swapping pays", says, [panel])


def _chart_loads(loads: Sequence[Load]) -> Chart:
    lines = []
    for index, (prompt, outputs) in enumerate(dict.fromkeys((load.prompt, load.outputs) for load in loads)):
        of = [load for load in loads if (load.prompt, load.outputs) == (prompt, outputs)]
        x, y = np.array([load.link / GB for load in of]), np.array([100 * load.gain for load in of])
        lines.append(Line(f"{prompt:,} + {outputs:,} tokens", x, y, series(index)))
    reach = 1.1 * max(float(np.abs(line.y).max()) for line in lines)
    panel = Panel(lines, "link, GB/s", "time saved by swapping, %", x_log=True, y_range=(-reach, reach))
    says = f"Batches on {GPU} whose cache holds {HELD} whole requests: makespan with swapping against recomputing."
    return Chart("swap-or-recompute-load", "Batches under pressure", says, [panel])
