"""From which batch on speculation no longer pays: by drafts, acceptance, context, model, card and loop.

A server decodes `batch` requests of one context. Without drafts it takes a step for a token of each. With k drafts,
each of which comes true behind accepted ones with probability a, it takes a longer step for (1 - a^(k+1)) / (1 - a).
Steps take what the cost model says of their kernels and CPU phases: one after the other in the synchronous loop, the
longer of both in the asynchronous one. Whole runs of the simulator are held against that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np

import cbsim
from cbsim.cost.base import NS, Cost
from cbsim.draw.chart import BLACK, GREY, Chart, Level, Line, Mark, Panel, Points, Style, series
from cbsim.draw.report import Table
from cbsim.machine import simulate
from cbsim.policy.plan import Chunk, StepCounts, StepPlan, StepWork
from cbsim.policy.request import RequestSpec
from cbsim.runs.assemble import cost_model, scheduler
from cbsim.scenario import shapes
from reports import page

MODELS: Mapping[str, int] = {"llama-3.1-8b": 1, "llama-3.1-70b": 4}  # GPUs that share its layers
CARDS = ("h100-sxm", "h200-sxm")
LOOPS = ("sync", "async")
DRAFTS = (1, 2, 3, 5, 7)
RATES = (0.5, 0.6, 0.7, 0.8, 0.9)
CONTEXTS = (1024, 8192, 32768)
BATCHES = (1, 4, 16, 64, 128, 256)
MOST = 512  # requests of a batch
USUAL, USUAL_RATE, USUAL_DRAFTS = 1024, 0.7, 3
SHOWN, RATES_SHOWN = (1, 3, 5, 7), (0.3, 0.95)  # drafts and acceptance in the figure
CHECKED = (32, 64, 128)  # batches of whole runs
OUTPUTS = 240
VOCABULARY = 32_000  # of the head that drafts, as EAGLE-3 heads have
SPEC = RequestSpec(0, "0", 0, 1 << 20, 1, 1)


def scenario(model: str, card: str, drafts: int, rate: float, **fields: Any) -> cbsim.Scenario:
    """A server of vLLM; its head is a layer of the model's with a small vocabulary."""
    head = shapes.model(model).model_copy(update={"name": "head", "layers": 1, "vocab": VOCABULARY})
    drafter = {"model": head.model_dump(mode="json")}
    speculation = {"method": "eagle", "k": drafts, "acceptance": {"rate": rate}, "drafter": drafter}
    usual: dict[str, Any] = {
        "question": "Does speculation pay?",
        "model": model,
        "hardware": card,
        "workload": {"kind": "synthetic", "requests": 1, "prompt_tokens": 1, "output_tokens": 1},
        "scheduler": {"name": "vllm", "max_num_seqs": MOST},
        "cost": {"kind": "roofline", "tensor_parallel": MODELS[model]},
        "speculation": speculation if drafts else None,
    }
    return cbsim.load(usual | fields)


class Server(NamedTuple):
    """What a step of a server follows from, and the tokens that its cache holds."""

    cost: Cost
    graphs: Any
    drafts: int
    tokens: int

    @classmethod
    @cache
    def of(cls, model: str, card: str, drafts: int) -> Server:
        made = scenario(model, card, drafts, USUAL_RATE)
        policy = scheduler(made, "async")
        tokens = made.options("async").num_blocks * made.block_size
        return cls(cost_model(made), simulate.graphs(made, policy), drafts, tokens)

    def step_s(self, batch: int, context: int, loop: str) -> float:
        """The time of a step of such a batch."""
        width = 1 + self.drafts
        chunks = tuple([Chunk(SPEC, at, context, width, (), width) for at in range(batch)])
        work = StepWork(chunks, prefill_tokens=batch * width, drafts=self.drafts)
        if not self.drafts:
            work = StepWork(decodes=batch, decode_context=batch * context, longest_context=context)
        plan = StepPlan(0, work, counts=StepCounts(table_blocks=batch * context // 16))
        shape = self.graphs.shape(plan)
        gpu, cpu = sum(self.cost.gpu_ns(plan, shape.tokens)), sum(self.cost.cpu_ns(plan))
        cpu += self.cost.launch_ns * int(shape.eager)
        return float(gpu + cpu if loop == "sync" else max(gpu, cpu)) / NS


def tokens_a_step(drafts: int, rate: float) -> float:
    return sum(rate**at for at in range(drafts + 1))


@cache
def slower(model: str, card: str, context: int, loop: str, drafts: int, batch: int) -> float:
    """How much longer a step with drafts takes."""
    steps = [Server.of(model, card, k).step_s(batch, context, loop) for k in (drafts, 0)]
    return steps[0] / steps[1]


def speed_up(model: str, card: str, context: int, loop: str, drafts: int, rate: float, batch: int) -> float:
    return tokens_a_step(drafts, rate) / slower(model, card, context, loop, drafts, batch)


def fits(model: str, card: str, context: int, drafts: int = USUAL_DRAFTS) -> int:
    """The requests that the cache holds, at most MOST."""
    return min(MOST, Server.of(model, card, drafts).tokens // (context + OUTPUTS))


def batches(most: int) -> list[int]:
    """Every batch up to 16, then each 4 % larger."""
    steps = [*range(1, 17), *(round(16 * 1.04**at) for at in range(1, 90))]
    return [*dict.fromkeys(batch for batch in steps if batch < most), most]


def pays_up_to(model: str, card: str, context: int, loop: str, drafts: int, rate: float) -> int | None:
    """The largest batch that is faster with drafts, 0 for none; None if all that fit are."""
    tried = batches(fits(model, card, context, drafts))
    paying = [batch for batch in tried if speed_up(model, card, context, loop, drafts, rate, batch) > 1]
    if not paying:
        return 0
    return None if paying[-1] == tried[-1] else paying[-1]


def best(model: str, card: str, context: int, loop: str, rate: float, batch: int) -> tuple[float, int]:
    """The best speed-up, and the drafts that give it; 0 drafts where none does."""
    ups = [(speed_up(model, card, context, loop, k, rate, batch), k) for k in DRAFTS]
    return max([*ups, (1.0, 0)])


# -- whole runs -------------------------------------------------------------------------------------------------------


def ran(model: str, card: str, loop: str, batch: int, drafts: int) -> float:
    """The mean TPOT of the eighth of a batch whose prompts were last: no prompt is computed while they decode."""
    prompt = USUAL - OUTPUTS // 2
    load = {"kind": "synthetic", "requests": batch, "prompt_tokens": prompt, "output_tokens": OUTPUTS}
    made: Any = cbsim.run(scenario(model, card, drafts, USUAL_RATE, workload=load, loop={"mode": loop}))
    ttft, tpot = (np.array(made.requests[name].to_pylist(), dtype=float) for name in ("ttft_s", "tpot_s"))
    return float(tpot[np.argsort(ttft, kind="stable")[-max(1, batch // 8) :]].mean())


def checks() -> list[dict[str, Any]]:
    points = []
    for model, loop, batch in product(MODELS, LOOPS, CHECKED):
        found = ran(model, CARDS[0], loop, batch, 0) / ran(model, CARDS[0], loop, batch, USUAL_DRAFTS)
        by_step = speed_up(model, CARDS[0], USUAL, loop, USUAL_DRAFTS, USUAL_RATE, batch)
        points.append({"model": model, "loop": loop, "batch": batch, "run": found, "steps": by_step})
    return points


def check_table(points: Sequence[Mapping[str, Any]]) -> Table:
    rows = [(of["model"], of["loop"], f"{of['batch']}", f"{of['run']:.2f}", f"{of['steps']:.2f}") for of in points]
    return Table("", ("model", "loop", "batch", "speed-up of a run", "by its steps"), rows)


# -- tables and the figure --------------------------------------------------------------------------------------------


def even_table(model: str) -> Table:
    """A row a card, context and loop: the largest batch that drafts make faster, by rate and drafts."""
    columns = [*product((0.5, 0.7, 0.9), (1, 3, 7))]
    rows = []
    for card, context, loop in product(CARDS, CONTEXTS, LOOPS):
        cells = []
        for rate, drafts in columns:
            up_to = pays_up_to(model, card, context, loop, drafts, rate)
            cells.append("all" if up_to is None else f"{up_to}" if up_to else "none")
        rows.append((card, f"{context // 1024}K", f"{fits(model, card, context)}", loop, *cells))
    header = ("card", "context", "requests that fit", "loop", *(f"{rate:g}, {k}" for rate, k in columns))
    return Table("", header, rows)


def best_table(model: str) -> Table:
    """A row a card, context and loop: the best speed-up and its drafts at the usual rate, by batch."""
    rows = []
    for card, context, loop in product(CARDS, CONTEXTS, LOOPS):
        cells = []
        for batch in BATCHES:
            up, drafts = best(model, card, context, loop, USUAL_RATE, batch)
            shown = f"{up:.2f} ({drafts})" if drafts else "1 (none)"
            cells.append(shown if batch <= fits(model, card, context) else "-")
        rows.append((card, f"{context // 1024}K", loop, *cells))
    return Table("", ("card", "context", "loop", *(f"batch {batch}" for batch in BATCHES)), rows)


def chart(points: Sequence[Mapping[str, Any]]) -> Chart:
    """Above: speed-up by batch. Below: the largest batch that pays, by acceptance."""
    panels = [speed_panel(model, points) for model in MODELS] + [even_panel(model) for model in MODELS]
    return Chart("speculation-pays", "Speculation pays for small batches: how small", "", panels, columns=2)


def named(model: str) -> str:
    return f"{model}, {MODELS[model]} H100"


def speed_panel(model: str, points: Sequence[Mapping[str, Any]]) -> Panel:
    marks: list[Mark] = [Level("", 1.0, Style(GREY))]
    of = np.array(batches(fits(model, CARDS[0], USUAL)), dtype=float)
    for number, drafts in enumerate(SHOWN):
        for loop, dash in zip(LOOPS, ("dashed", "solid"), strict=True):
            ups = [speed_up(model, CARDS[0], USUAL, loop, drafts, USUAL_RATE, int(batch)) for batch in of]
            name = f"{drafts} drafts" if drafts > 1 else "1 draft"
            marks.append(Line(f"{name}, {loop}", of, np.array(ups), Style(series(number).colour, dash)))
    mine = [point for point in points if (point["model"], point["loop"]) == (model, "async")]
    at, runs = ([float(point[name]) for point in mine] for name in ("batch", "run"))
    marks.append(Points(f"whole runs, {USUAL_DRAFTS} drafts, async", np.array(at), np.array(runs), Style(BLACK)))
    title = f"{named(model)}: {USUAL:,} tokens, acceptance {USUAL_RATE:g}"
    return Panel(marks, "requests in the batch", "speed-up", title, x_log=True, x_ticks=[4.0**at for at in range(5)])


def even_panel(model: str) -> Panel:
    most, rates = fits(model, CARDS[0], USUAL), np.linspace(*RATES_SHOWN, 61)
    marks: list[Mark] = []
    for number, drafts in enumerate(SHOWN):
        up_to = [pays_up_to(model, CARDS[0], USUAL, "async", drafts, float(rate)) for rate in rates]
        even = np.array([float(most) if batch is None else batch or np.nan for batch in up_to])
        marks.append(Line("", rates, even, series(number)._replace(dash="solid")))
    axes = "acceptance of a draft behind accepted ones", "largest batch that is faster"
    shown: Any = {"x_range": RATES_SHOWN, "y_range": (20.0, 1.3 * most)}
    return Panel(marks, *axes, f"{named(model)}: break-even, async; {most} requests fit", y_log=True, **shown)


def main() -> None:
    points = checks()
    tables = {"runs": check_table(points)}
    for model in MODELS:
        size = model.rpartition("-")[2]
        tables |= {f"{size}-even": even_table(model), f"{size}-best": best_table(model)}
    speeds = [
        {
            "model": model,
            "card": card,
            "context": context,
            "loop": loop,
            "drafts": k,
            "batch": batch,
            "slower": slower(model, card, context, loop, k, batch),
        }
        for model, card, context, loop, k in product(MODELS, CARDS, CONTEXTS, LOOPS, DRAFTS)
        for batch in BATCHES
        if batch <= fits(model, card, context)
    ]
    page.write(__file__, tables, [chart(points)], {"steps": speeds, "runs": points})


if __name__ == "__main__":
    main()
