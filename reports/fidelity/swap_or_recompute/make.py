"""Swap or recompute: the context and the host link from which a preempted request should keep its KV.

The report has a closed form beside the simulator: two requests of which one is preempted, where nothing else differs,
and batches under pressure, where the two rules also order the work differently.

A preempted request has n tokens in the cache. Swapped, their KV of k bytes each crosses a link of B bytes/s twice,
and the row that goes on computes one token. Recomputed, its row computes m = n + 1. On a roofline that takes longer by

    extra(n) = n e + max(m l, i) - i + max(p m (m + 1) / 2, m v) - max(p m, m v)

with e and l the seconds of a token in the embedding and in the linear layers, p those of a pair of tokens in attention,
v to read a cached token, and i what the linear layers take for the one token: as long as a step reads the weights for
longer than it computes, more tokens cost nothing there. Beyond i / l and 2 v / p tokens this is a parabola, and
swapping pays where

    p/2 m^2 + (e + l + p/2 - v - s) m - (i + e - s) > 0,    s = c k / B

with c = 2 if the GPU waits for both ways, 1 if one of them goes on beside the steps. Below i / l tokens it cannot pay,
because a link is slower than the memory: s > e + v. So it pays from the larger root on.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import inf, sqrt
from typing import Any, NamedTuple

import numpy as np

import cbsim
from cbsim.draw.chart import BLACK, Chart, Line, Mark, Panel, Points, Style, series
from cbsim.draw.report import Table
from cbsim.scenario import shapes
from reports import page

MODELS = ("llama-3.1-8b", "llama-2-7b", "qwen2.5-32b", "llama-3.2-1b")
GPUS = ("h100-sxm", "a100-80gb", "l4")
SIZE = 16  # tokens in a block
GB = 1e9
LINKS = (4 * GB, 8 * GB, 10 * GB, 12 * GB, 16 * GB, 32 * GB, 64 * GB)
PROMPTS = (256, 1024, 4096, 16384)
LENGTHS = (256, 1024, 8192, 32768)
GROWN = 32  # tokens that each of the pair generates before the cache is full
OUTPUTS = 64
LOADS = ((512, 1024, 96), (2048, 2048, 48), (8192, 4096, 24))  # prompt, outputs, requests
ROOM = 4  # whole requests that the cache of a batch holds
LOAD_LINKS = (4 * GB, 8 * GB, 12 * GB, 16 * GB, 64 * GB)
BOTH_WAYS, ONE_WAY = 2, 1
NO_CPU = {
    "schedule": {"base_s": 0, "per_request_s": 0},
    "prepare": {"base_s": 0, "per_request_s": 0},
    "launch": {"base_s": 0},
    "update": {"base_s": 0, "per_request_s": 0},
}


def scenario(model: str = MODELS[0], gpu: str = GPUS[0], link: float | None = None, **parts: Any) -> cbsim.Scenario:
    """A model on a GPU, perhaps behind another link, by the roofline and without CPU time."""
    hardware = shapes.hardware(gpu).model_dump()
    hardware |= {} if link is None else {"pcie_bytes_s": link}
    workload = {"kind": "synthetic", "requests": 1, "prompt_tokens": 1, "output_tokens": 1}
    usual = {"question": "Swap or recompute?", "model": model, "hardware": hardware, "workload": workload}
    usual |= {"kv_cache": {"num_blocks": 64, "block_size": SIZE}}  # of no matter to the closed form
    return cbsim.load(
        {
            **usual,
            "cost": {"kind": "roofline", **CONSTANT, "cpu": NO_CPU},
            **parts,
        }
    )


CONSTANT: dict[str, Any] = {"compute_efficiency": {}, "memory_efficiency": {}}  # shares, whatever the size


class Terms(NamedTuple):
    """Seconds of the roofline for a dense model in one type on one GPU, and bytes of a cached token."""

    embedding_s: float  # a query token
    linear_s: float  # a query token
    weights_s: float  # to read those of the linear layers
    pair_s: float  # a query token and a token up to it
    cached_s: float  # to read a token of the cache
    kv_bytes: int

    @classmethod
    def of(cls, scenario: Any) -> Terms:
        model, gpu, cost = scenario.model, scenario.hardware, scenario.cost
        flops = getattr(gpu.flops, model.dtype) * cost.compute_efficiency.prefill
        weights = gpu.memory_bandwidth_bytes_s * cost.memory_efficiency.weights
        matrices = model.layer_parameters
        return cls(
            embedding_s=model.hidden * model.dtype_bytes / weights,
            linear_s=2 * matrices / flops,
            weights_s=matrices * model.dtype_bytes / weights,
            pair_s=4 * model.layers * model.heads * model.head_dim / flops,
            cached_s=model.kv_bytes_per_token / (gpu.memory_bandwidth_bytes_s * cost.memory_efficiency.kv),
            kv_bytes=model.kv_bytes_per_token,
        )

    def least_s(self, others: int) -> float:
        """What the linear layers of a step take for one token beside `others`, which have theirs."""
        return max(self.linear_s, self.weights_s - others * self.linear_s)

    def extra_s(self, tokens: int, others: int = 0) -> float:
        """How much longer a step takes in which so many tokens are computed again, in one chunk with the next one."""
        m, least = tokens + 1, self.least_s(others)
        linear = max(m * self.linear_s, least) - least
        attention = max(self.pair_s * m * (m + 1) / 2, m * self.cached_s) - max(self.pair_s * m, m * self.cached_s)
        return tokens * self.embedding_s + linear + attention

    def transfer_s(self, tokens: int, link_bytes_s: float, ways: int = BOTH_WAYS) -> float:
        """How long the GPU waits for the KV of so many tokens."""
        return ways * tokens * self.kv_bytes / link_bytes_s

    def link_bytes_s(self, tokens: int, others: int = 0, ways: int = BOTH_WAYS) -> float:
        """The link from which on it pays to swap so many tokens; inf if none is fast enough."""
        extra = self.extra_s(tokens, others)
        return ways * tokens * self.kv_bytes / extra if extra > 0 else inf

    def tokens(self, link_bytes_s: float, others: int = 0, ways: int = BOTH_WAYS) -> float:
        """The context from which on swapping over such a link pays: the larger root of the parabola, less one token."""
        s, square = ways * self.kv_bytes / link_bytes_s, self.pair_s / 2
        slope = self.embedding_s + self.linear_s + square - self.cached_s - s
        square_of_root = slope * slope + 4 * square * (self.least_s(others) + self.embedding_s - s)
        root = (sqrt(max(0.0, square_of_root)) - slope) / (2 * square)
        return max(0.0, root - 1)


def runs(link: float, workload: tuple[int, int, int], tokens: int, budget: int) -> dict[str, cbsim.Result]:
    """Swapping and recomputing. `workload`: prompt, outputs, requests, all at once. The cache holds `tokens`, a step
    computes `budget`.
    """
    prompt, outputs, requests = workload
    made: dict[str, Any] = {}
    for mode in ("swap", "recompute"):
        rules = {"preemption_mode": mode, "swap_space_gib": 1024, "enable_prefix_caching": False}
        made[mode] = cbsim.run(
            scenario(
                link=link,
                workload={"kind": "synthetic", "requests": requests, "prompt_tokens": prompt, "output_tokens": outputs},
                scheduler={"name": "vllm", "max_num_batched_tokens": budget, **rules},
                kv_cache={"num_blocks": 1 + tokens // SIZE, "block_size": SIZE},
                loop={"mode": "sync"},
            )
        )
    return made


def pair(prompt: int, link: float) -> dict[str, float]:
    """Two requests fill the cache. The second is preempted with `tokens` computed, and goes on alone when the first has
    ended: what swapping saves of the run, and what the closed form says.
    """
    both = runs(link, (prompt, OUTPUTS, 2), 2 * (prompt + GROWN), 2 * prompt)
    swap, recompute = (both[mode].summary for mode in ("swap", "recompute"))
    assert swap["preemptions"] == recompute["preemptions"] == 1
    terms, tokens = Terms.of(scenario()), prompt + GROWN
    return {
        "tokens": tokens,
        "link": link,
        "saved_s": recompute["makespan_s"] - swap["makespan_s"],
        "closed_s": terms.extra_s(tokens) - terms.transfer_s(tokens, link),
    }


def load(prompt: int, outputs: int, requests: int, link: float) -> dict[str, Any]:
    """A batch whose cache holds `ROOM` whole requests, under both rules. The closed form of what swapping saves: what
    the one rule computes again, less what the other transfers.
    """
    both = runs(link, (prompt, outputs, requests), ROOM * (prompt + outputs), 8192)
    entry: dict[str, Any] = {"prompt": prompt, "outputs": outputs, "requests": requests, "link": link}
    for mode, result in both.items():
        numbers = {name: result.summary[name] for name in ("makespan_s", "preemptions", "recomputed_tokens")}
        entry[mode] = numbers | {"blocks": int(sum(result.transfers["blocks"]))}
    swap, recompute, terms = entry["swap"], entry["recompute"], Terms.of(scenario())
    lost = round(recompute["recomputed_tokens"] / max(1, recompute["preemptions"]))  # tokens, on the mean
    again_s = recompute["preemptions"] * terms.extra_s(lost, ROOM - 1)
    transfer_s = terms.transfer_s(swap["blocks"] * SIZE, link, ONE_WAY)
    entry["gain"] = 1 - swap["makespan_s"] / recompute["makespan_s"]
    return entry | {"closed": (again_s - transfer_s) / recompute["makespan_s"]}


def closed_table() -> Table:
    rows = []
    for model, gpu in product(MODELS, GPUS):
        case = scenario(model, gpu)
        terms, own = Terms.of(case), case.hardware.pcie_bytes_s
        links = [terms.link_bytes_s(tokens) / GB for tokens in LENGTHS]
        lengths = [f"{terms.tokens(own):,.0f}", f"{terms.tokens(own / 4):,.0f}"]
        shown = [f"{link:.1f}" if link < 1000 else "> 1,000" for link in links]  # what no host link reaches
        rows.append([model, gpu, f"{terms.kv_bytes / 1024:.0f} KiB", f"{own / GB:.0f}", *lengths, *shown])
    header = ["model", "GPU", "KV a token", "link, GB/s", "tokens from which", "at a quarter of it"]
    return Table("", [*header, *(f"link at {tokens:,}" for tokens in LENGTHS)], rows)


def pair_table(pairs: Sequence[dict[str, float]]) -> Table:
    rows = [
        (f"{p['tokens']:,}", f"{p['link'] / GB:.0f}", *(f"{1e3 * p[name]:+.2f}" for name in ("saved_s", "closed_s")))
        for p in pairs
    ]
    return Table("", ["tokens", "link, GB/s", "swapping saves, ms", "closed form"], rows)


def load_table(loads: Sequence[dict[str, Any]]) -> Table:
    header = ["prompt + outputs", "link, GB/s", "swap, s", "recompute, s", "saved", "closed form"]
    rows = []
    for each in loads:
        swap, recompute = each["swap"], each["recompute"]
        rows.append(
            (
                f"{each['prompt']:,} + {each['outputs']:,}",
                f"{each['link'] / GB:.0f}",
                *(f"{ran['makespan_s']:.2f}" for ran in (swap, recompute)),
                f"{each['gain']:+.1%}",
                f"{each['closed']:+.1%}",
                f"{swap['preemptions']}, {recompute['preemptions']}",
                f"{swap['blocks']:,}",
                f"{recompute['recomputed_tokens']:,}",
            )
        )
    return Table("", [*header, "preemptions", "blocks", "tokens"], rows)


def pair_chart(pairs: Sequence[dict[str, float]]) -> Chart:
    links, terms = np.geomspace(3 * GB, 80 * GB, 120), Terms.of(scenario())
    marks: list[Mark] = []
    for index, (others, name) in enumerate(((0, "alone in its step"), (1000, "beside 1,000 tokens"))):
        context = np.array([max(1.0, terms.tokens(link, others)) for link in links])
        marks.append(Line(name, links / GB, context, series(index)))
    for name, won, marker in (("swapping was faster", True, "circle"), ("recomputing was faster", False, "cross")):
        of = [p for p in pairs if (p["saved_s"] > 0) == won]
        x, y = np.array([p["link"] / GB for p in of]), np.array([float(p["tokens"]) for p in of])
        marks.append(Points(name, x, y, Style(BLACK, "solid", marker)))
    panel = Panel(marks, "link, GB/s", "tokens computed", x_log=True, y_log=True)
    return Chart("swap-or-recompute", "From where swapping pays", "", [panel])


def load_chart(loads: Sequence[dict[str, Any]]) -> Chart:
    lines = []
    for index, (prompt, outputs, _) in enumerate(LOADS):
        of = [each for each in loads if each["prompt"] == prompt]
        x, y = np.array([each["link"] / GB for each in of]), np.array([100 * each["gain"] for each in of])
        lines.append(Line(f"{prompt:,} + {outputs:,} tokens", x, y, series(index)))
    reach = 1.1 * max(float(np.abs(line.y).max()) for line in lines)
    panel = Panel(lines, "link, GB/s", "time saved by swapping, %", x_log=True, y_range=(-reach, reach))
    return Chart("swap-or-recompute-load", "Batches under pressure", "", [panel])


def main() -> None:
    pairs = [pair(prompt, link) for prompt, link in product(PROMPTS, LINKS)]
    loads = [load(*each, link) for each in LOADS for link in LOAD_LINKS]
    tables = {"closed": closed_table(), "pairs": pair_table(pairs), "loads": load_table(loads)}
    page.write(__file__, tables, [pair_chart(pairs), load_chart(loads)], {"pairs": pairs, "loads": loads})


if __name__ == "__main__":
    main()
