"""`cbsim recommend`: how many servers of which card, against closed forms and what must hold whatever the numbers."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.calls import call

import cbsim
from cbsim.errors import Interrupted, RunError, ScenarioError, UserError
from cbsim.metrics import metrics
from cbsim.metrics.checks import parse
from cbsim.record.columns import NS
from cbsim.record.record import STATUSES
from cbsim.scenario import scenario as scenarios
from cbsim.scenario import shapes
from cbsim.scenario.scenario import Scenario
from cbsim.scenario.shapes import Hardware
from cbsim.search import recommend as searching
from cbsim.search import recommended
from cbsim.search.probe import Terms
from cbsim.search.recommend import Candidate, Search, Server, Sizing
from cbsim.sweeps.store import Run, Runs, Store
from cbsim.sweeps.work import Here, Task
from cbsim.workload import generators
from cbsim.workload.requests import Streams

SERVICE_S = 1.0
CARD = shapes.hardware("h100-sxm")


# -- queues whose answer is known -------------------------------------------------------------------------------------


def queue(rate: float, seed: int, requests: int) -> Sizing:
    """Servers that need exactly a second for each request, which Poisson arrivals reach at random: each is M/D/1."""
    fields = {
        "seed": 1000 * seed,
        "workload": {
            "kind": "synthetic",
            "requests": requests,
            "prompt_tokens": 1,
            "output_tokens": 1,
            "arrivals": {"kind": "poisson", "rate_per_s": rate},
        },
        "scheduler": {"name": "vllm_v0", "max_num_seqs": 1},
        "kv_cache": {"block_size": 16, "num_blocks": 64},
        "cost": {"kind": "constant", "step_s": SERVICE_S},
        "loop": {"mode": "sync", "cuda_graphs": {"enabled": False}},
        "fleet": {"router": {"name": "random"}},
    }
    return searching.sizing("llama-3.1-8b", fields, {"loop.mode": "sync"}, 24)


def exact(rate: float, ttft_s: float) -> int:
    """The least number of servers by Pollaczek and Khinchine: the wait is u s / (2 (1 - u)) at the utilisation u."""
    for count in range(1, 25):
        busy = rate * SERVICE_S / count
        if busy < 1 and SERVICE_S + busy * SERVICE_S / (2 * (1 - busy)) <= ttft_s:
            return count
    raise AssertionError(rate)


class Recursion(Runs):
    """Runs of such queues without the simulator, by Lindley's recursion of each server."""

    def __init__(self) -> None:
        """Needs neither a store nor an executor."""
        self._made: dict[tuple[str, int, int], Run] = {}

    def of(self, scenarios: Sequence[Scenario], warmup: float) -> list[Run]:
        keys = [(each.hardware.name, each.seed, len(each.servers)) for each in scenarios]
        for key, each in zip(keys, scenarios, strict=True):
            self._made[key] = self._made.get(key) or self._run(each, warmup)
        return [self._made[key] for key in keys]

    def _run(self, scenario: Scenario, warmup: float) -> Run:
        workload: Any = scenario.workload
        streams, count = Streams.of(scenario.seed), len(scenario.servers)
        at_ns = np.array(generators.arrival_times(workload.arrivals, workload.requests, streams.arrivals))
        server, service_ns = streams.spread.integers(0, count, len(at_ns)), round(SERVICE_S * NS)
        ttft_ns = np.zeros(len(at_ns))
        for number in range(count):
            mine = server == number
            backlog = np.arange(mine.sum()) * service_ns - at_ns[mine]
            ttft_ns[mine] = backlog - np.minimum.accumulate(backlog) + service_ns
        ttft = metrics.distribution(ttft_ns[int(warmup * len(at_ns)) :] / NS)
        by_status = dict.fromkeys(STATUSES, 0)
        summary = {"requests": len(at_ns), "requests_by_status": by_status, "ttft_s": ttft, "e2e_s": ttft}
        return Run({**summary, "output_tokens": 0, "makespan_s": 1.0}, [])


class Quick(Candidate):
    """The same scenarios, without being validated again for each number."""

    def _build(self, count: int) -> Scenario:
        if 1 not in self.built:
            self.built[1] = super()._build(1)
        fleet = self.built[1].fleet
        assert fleet is not None
        pools = (fleet.pools[0].model_copy(update={"count": count}), *fleet.pools[1:])
        return self.built[1].model_copy(update={"fleet": fleet.model_copy(update={"pools": pools})})


def only(sizing: Sizing, card: Hardware = CARD, name: str = "h100", kind: type[Candidate] = Candidate) -> Candidate:
    return kind(sizing, Server(name, card, 1, {}))


def answer(
    of: Sequence[Candidate], ttft_s: float, runs: Runs, replicates: int = 16, confidence: float = 0.95
) -> list[Search]:
    terms = searching.terms(of, [f"ttft.mean<={ttft_s}s"], replicates=replicates, confidence=confidence)
    return searching.search(of, terms, runs)


def test_the_number_is_the_closed_forms_in_a_hundred_of_a_hundred_cases() -> None:
    """Rates and bounds are drawn; the interval of the number, with a confidence of 99.9 %, has that of the closed form
    in each, and has two numbers at most in nearly all.
    """
    drawn, wide = random.Random(41), 0
    for seed in range(100):
        rate, ttft_s = drawn.uniform(0.5, 10), drawn.uniform(1.3, 5)
        best = answer([only(queue(rate, seed, 4000), kind=Quick)], ttft_s, Recursion(), 32, 0.999)[0]
        least, most = best.span
        assert least <= exact(rate, ttft_s) <= (most or 24), (seed, rate, ttft_s)
        wide += most is None or most - least > 1
    assert wide <= 5


def test_simulated_servers_agree_with_the_closed_form(tmp_path: Path) -> None:
    """The same by the simulator itself, with its router and its store."""
    for seed, (rate, ttft_s) in enumerate([(1.7, 2.2), (3.1, 1.6)]):
        runs = Runs(Store(tmp_path), Here())
        best = answer([only(queue(rate, seed, 600))], ttft_s, runs, 8)[0]
        least, most = best.span
        assert least <= exact(rate, ttft_s) <= (most or 24)
        assert best.answered and least <= best.at


# -- what holds whatever the numbers ----------------------------------------------------------------------------------


def test_prices_times_a_factor_leave_the_ranking() -> None:
    """Cards of one speed whose prices are ties or nearly so: any factor leaves the order, and what is given up."""
    prices, drawn = (3.0, 1.5, 1.5, 2.0000001, 7.0), random.Random(1)
    sizing = queue(2.5, 1, 1000)

    def ranking(factor: float) -> list[tuple[str, bool]]:
        of = [
            only(sizing, CARD.model_copy(update={"price_usd_hour": price * factor}), f"card{at}", Quick)
            for at, price in enumerate(prices)
        ]
        ranked = answer(of, 2.0, Recursion(), 8)
        return [(each.candidate.server.name, each.answered) for each in ranked]

    first = ranking(1.0)
    assert [name for name, _ in first][:2] == ["card1", "card2"]
    assert all(ranking(10 ** drawn.uniform(-3, 3)) == first for _ in range(5))


LOAD = {
    "workload": {
        "kind": "synthetic",
        "requests": 60,
        "prompt_tokens": 512,
        "output_tokens": 32,
        "arrivals": {"kind": "poisson", "rate_per_s": 40},
    },
    "scheduler": {"name": "vllm", "max_num_seqs": 16},
    "cost": {"kind": "roofline", "compute_efficiency": {}, "memory_efficiency": {}},
}
FEW: dict[str, Any] = {"kind": "synthetic", "requests": 4, "arrivals": {"kind": "poisson", "rate_per_s": 0.01}}
LONG = {**FEW, "prompt_tokens": 140_000, "output_tokens": 2}
SHORT = {**FEW, "prompt_tokens": 9, "output_tokens": 1}


def better(card: Hardware, drawn: random.Random) -> Hardware:
    """A card that has more of everything and costs no more."""
    factor = drawn.choice([1.0, 1.05, 1.5])
    flops = {name: rate and rate * factor for name, rate in card.flops.model_dump().items()}
    more = {
        name: getattr(card, name) * drawn.choice([1, 1.1, 2]) for name in ("memory_bandwidth_bytes_s", "pcie_bytes_s")
    }
    price = (card.price_usd_hour or 0) * drawn.choice([1.0, 0.9])
    update = {"flops": card.flops.model_copy(update=flops), "price_usd_hour": price, "name": "better"}
    return card.model_copy(update={**more, **update, "memory_bytes": int(card.memory_bytes * 1.1)})


def test_a_card_that_is_better_in_everything_is_never_behind(tmp_path: Path) -> None:
    drawn, runs = random.Random(3), Runs(Store(tmp_path), Here())
    for name in ("h100-sxm", "l40s", "a100-80gb"):
        card = shapes.hardware(name)
        sizing = searching.sizing("llama-3.1-8b", LOAD, (), 16)
        ranked = answer([only(sizing, card, "card"), only(sizing, better(card, drawn), "better")], 0.3, runs, 4)
        names = [each.candidate.server.name for each in ranked if not each.candidate.beside]
        assert names == ["better", "card"]


def test_two_cards_together_are_a_scenario_that_can_be_run(tmp_path: Path) -> None:
    """The dearer card with a part of the load and a cheap one with the rest; the scenario is read as it was written."""
    cheap = Server("l40s", shapes.hardware("l40s"), 1, {"scheduler.max_num_seqs": 8})
    sizing = searching.sizing("llama-3.1-8b", LOAD, {"workload.requests": 5}, 16)
    mixed = Candidate(sizing, Server("h100", CARD, 2, {}), ((3, cheap),)).scenario(2, 4)
    (_, first), (_, second) = mixed.pools
    assert (first.gpus, second.gpus, mixed.all_gpus) == (2, 1, 7)
    assert (first.hardware, second.hardware) == (CARD, cheap.card)
    assert [server.scheduler.max_num_seqs for server in (first, second)] == [16, 8]  # type: ignore[union-attr]
    assert mixed.price_usd_hour == pytest.approx(4 * 3.0 + 3 * 1.5) and mixed.seed == 4
    path = tmp_path / "mixed.yaml"
    path.write_text(scenarios.dump(mixed))
    assert scenarios.load(path).model_dump() == mixed.model_dump()


def test_two_cards_are_tried_where_rounding_leaves_room() -> None:
    """Three dear servers or five cheap ones: with two cheap ones two dear ones do, with four of them one. The cheapest
    come first, and the dearer kind of a card is not tried.
    """

    sizing = searching.sizing("llama-3.1-8b", LOAD, (), 8)
    terms = searching.terms([only(sizing)], ["ttft.p99<=1s"])

    def search(name: str, count: int, price: float, **settings: int) -> Search:
        card = CARD.model_copy(update={"price_usd_hour": price})
        made = Search(Candidate(sizing, Server(name, card, 1, settings)), terms, Recursion())
        made.likely = count
        return made

    of = [search("dear", 3, 3.0), search("cheap", 5, 1.7), search("dear", 4, 3.0, seed=1)]
    mixed = searching.mixes(of)
    assert [each.label(each.first) for each in mixed] == ["2 x dear + 2 x cheap", "1 x dear + 4 x cheap"]


def test_two_cards_together_are_the_answer_where_they_are_cheapest(tmp_path: Path) -> None:
    """Servers of 0.5 s and of 1 s for each request, 2.4 a second: two fast ones for $ 6, three slow ones for $ 4.8, or
    one of each for $ 4.6, which has enough capacity. Energy is that of both boards by their activity.
    """
    fields = {**queue(2.4, 1, 200).document.data, "fleet": {"router": {"name": "least_in_flight"}}}
    sizing = searching.sizing("llama-3.1-8b", fields, (), 8)
    pairs = [("fast", 3.0, 0.5, 700.0), ("slow", 1.6, 1.0, 300.0)]
    cards = [CARD.model_copy(update={"price_usd_hour": usd, "power_w": watts}) for _, usd, _, watts in pairs]
    steps = [{"cost.step_s": step_s} for _, _, step_s, _ in pairs]
    of = [Candidate(sizing, Server(pairs[at][0], cards[at], 1, steps[at])) for at in (0, 1)]
    ranked = answer(of, 4.0, Runs(Store(tmp_path), Here()), 6)
    best = ranked[0]
    assert (best.usd_hour, sorted(best.candidate.cards)) == (4.6, ["fast", "slow"])
    assert [each.usd_hour for each in ranked if each.answered and not each.candidate.beside] == [4.8, 6.0]
    watts = {"fast": 700.0, "slow": 300.0}
    energies = []
    for run in best.runs:
        drawn = [watts[each["pool"]] * each["gpu_active"] for each in run.summary["per_server"]]
        energies.append(sum(drawn) * run.summary["makespan_s"] / run.summary["output_tokens"])
    assert best.joules == pytest.approx(sum(energies) / len(energies)) and best.joules > 0


def test_energy_is_that_of_active_boards(tmp_path: Path) -> None:
    """A server that steps for a second a token at 700 W: 700 J a token. It is unknown where a card's power is."""
    for power in (700.0, 350.0, None):
        card = CARD.model_copy(update={"power_w": power})
        best = answer([only(queue(0.2, 1, 100), card)], 5.0, Runs(Store(tmp_path), Here()), 2)[0]
        assert best.joules == (power and pytest.approx(power, rel=0.01))


def test_mixtures_that_share_experts_are_candidates_too() -> None:
    sizing = searching.sizing("qwen3-30b-a3b", LOAD, (), 8)
    of = searching.candidates(sizing, ["h100"], (1, 2), {})
    ranks = [each for each in of if each.ranks]
    assert [[each.count(value) for value in range(1, each.last + 1)] for each in ranks] == [[2, 4, 8]] * 2 + [
        [2, 4]
    ] * 2
    assert ranks[0].scenario(2).ranks == 4 and ranks[0].label(2).endswith(", as ranks")


def test_gpus_of_all_stages_count() -> None:
    """A pipeline of two stages of two GPUs is four GPUs at their price, as a knob and as a field of the load."""
    sizing = searching.sizing("llama-3.1-8b", LOAD, (), 8)
    of = searching.candidates(sizing, ["h100"], (2,), {"cost.pipeline_parallel": [1, 2]})
    assert [(each.gpus(1), each.last, each.scenario(2).all_gpus) for each in of] == [(2, 4, 4), (4, 2, 8)]
    assert of[1].usd_hour(1) == pytest.approx(2 * of[0].usd_hour(1))
    sizing = searching.sizing("llama-3.1-8b", LOAD, {"cost.pipeline_parallel": 2}, 8)
    assert {each.gpus(1) for each in searching.candidates(sizing, ["h100"], (2,), {})} == {4}


# -- pruning ----------------------------------------------------------------------------------------------------------


def test_the_data_sheet_rules_out_and_bounds() -> None:
    """Weights that are read longer than a token may take, and a rate whose operations need several cards."""
    sizing = searching.sizing("llama-3.1-8b", {**LOAD, "loop": {}}, {"workload.arrivals.rate_per_s": 2000}, 64)
    built = only(sizing).scenario(1)
    _, out = searching.by_data_sheet(only(sizing), Terms((parse("tpot.p99<=1ms"),)))
    assert out == "tpot.p99<=1ms: reading the weights alone takes 4.48 ms a token"
    requests = generators.build(built).open
    span_s = (requests[-1].arrival_ns - requests[0].arrival_ns) / 1e9
    flop = 2 * built.model.layer_parameters * 544 * 60
    expected = math.ceil(flop / CARD.flops.bfloat16 / span_s)
    assert searching.by_data_sheet(only(sizing), Terms((parse("tpot.p99<=1s"),))) == (expected, "") and expected > 8
    few = searching.sizing("llama-3.1-8b", {**LOAD, "loop": {}}, {"workload.arrivals.rate_per_s": 2000}, 8)
    _, out = searching.by_data_sheet(only(few), Terms((parse("tpot.p99<=1s"),)))
    assert out == f"the rate needs {expected} servers by the data sheet, 8 may be"


class Counted(Here):
    """An executor that counts its tasks."""

    tasks = 0

    def give(self, task: Task) -> None:
        Counted.tasks += 1
        super().give(task)


def test_a_second_search_makes_no_run(tmp_path: Path) -> None:
    """Runs are in the store, so a search that was interrupted goes on, and another goal uses what is there."""
    sizing = searching.sizing("llama-3.1-8b", LOAD, (), 8)
    runs, of = [Runs(Store(tmp_path), Counted()) for _ in range(2)], [only(sizing)]
    terms = searching.terms(of, ["ttft.p99<=2s"], replicates=4)
    texts = [str(recommended.recommend(of, terms, each)) for each in runs]
    assert Counted.tasks == runs[0].made > runs[1].made == 0 and texts[0] == texts[1]


class Interrupts(Counted):
    """An executor that is interrupted after a few tasks."""

    def give(self, task: Task) -> None:
        super().give(task)
        if Counted.tasks == 3:
            raise KeyboardInterrupt


def test_a_search_on_a_cluster_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address reaches the executor of a Ray cluster. What was made before an interruption is not made again: both
    parts together have the runs of a whole search, and its answer.
    """
    addresses: list[str] = []

    def search(executor: type[Here], store: str) -> str:
        def cluster(address: str) -> Here:
            addresses.append(address)
            return executor()

        monkeypatch.setattr("cbsim.sweeps.sweep.RayCluster", cluster)
        precision: dict[str, Any] = {"tensor": [1], "replicates": 4, "store": tmp_path / store, "ray": "head:6379"}
        return str(cbsim.recommend("llama-3.1-8b", LOAD, ["ttft.p99<=2s"], ["h100", "l40s"], **precision))

    monkeypatch.setattr(Counted, "tasks", 0)
    whole = search(Counted, "whole")
    made = Counted.tasks
    monkeypatch.setattr(Counted, "tasks", 0)
    with pytest.raises(Interrupted, match="goes on where it stopped"):
        search(Interrupts, "parts")
    there = len(list((tmp_path / "parts").glob("runs/*/*")))
    monkeypatch.setattr(Counted, "tasks", 0)
    assert search(Counted, "parts") == whole and addresses == ["head:6379"] * 3
    assert 0 < there < made == there + Counted.tasks


def test_a_list_of_requests_is_one_run_a_number(tmp_path: Path) -> None:
    """The seed changes nothing there: each number is run once and decided by its metric, and no confidence is claimed.
    Two bursts of a hundred prompts need more servers than one at the bound that is a little above a single prompt.
    """
    load = tmp_path / "load.csv"
    rows = [f"{at // 100},2000,2" for at in range(200)]
    load.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]))
    answer = cbsim.recommend(
        "llama-3.1-8b",
        load,
        ["ttft.max<=1s"],
        ["h100"],
        tensor=[1],
        knobs={"scheduler.max_num_seqs": [64]},
        store=tmp_path,
    )
    best = answer.best
    assert best.sure is not None and best.at > 1 and best.span == (best.at, best.at)
    assert [len(best.runs), best.binds] == [1, "TTFT (queue)"] and "without an interval" in str(answer)


def test_a_candidate_whose_runs_fail_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are answered; of the one that failed the reason is said."""
    sizing = searching.sizing("llama-3.1-8b", LOAD, (), 8)
    of, pilot = [only(sizing), only(sizing, name="b")], searching.Prober.pilot

    def failing(self: Any, value: float) -> Any:
        if self._make == of[1].scenario:
            raise RunError("the process died")
        return pilot(self, value)

    monkeypatch.setattr(searching.Prober, "pilot", failing)
    ranked = answer(of, 2.0, Runs(Store(tmp_path), Here()), 4)
    assert [each.candidate.server.name for each in ranked] == ["h100", "b"]
    assert ranked[1].out == "its runs fail: the process died" and not ranked[1].answered


@pytest.mark.parametrize("words", [("--set", "scheduler.max_num_batched_tokens=5"), ("load", 5), ("load", None)])
def test_a_setting_that_is_stated_is_no_knob_of_the_defaults(words: tuple[str, Any]) -> None:
    load = {**LOAD, "scheduler": {"name": "vllm", "max_num_batched_tokens": words[1]}} if words[0] == "load" else LOAD
    sizing = searching.sizing("llama-3.1-8b", load, [words[1]] if words[0] == "--set" else ())
    knobs = [dict(each.server.settings) for each in searching.candidates(sizing, ["h100"], (1,), {})]
    usual = [{"scheduler.max_num_batched_tokens": tokens} for tokens in (2048, 8192)]
    assert knobs == ([{}] if words[1] else usual)


# -- prefill and decode apart -----------------------------------------------------------------------------------------


def apart(rate: float) -> Sizing:
    """A server takes a request at a time and 0.1 s a step: a prefill is one, four tokens are four."""
    workload = {"kind": "synthetic", "requests": 200, "prompt_tokens": 16, "output_tokens": 4}
    fields = {
        "workload": workload | {"arrivals": {"kind": "constant", "rate_per_s": rate}},
        "scheduler": {"name": "vllm", "max_num_seqs": 1, "max_num_batched_tokens": 2048},
        "cost": {"kind": "constant", "step_s": 0.1},
        "loop": {"mode": "sync"},
        "fleet": {"router": {"name": "round_robin"}, "hand_off": {"router": {"name": "round_robin"}}},
    }
    return searching.sizing("llama-3.1-8b", fields, (), 8, 1e3)


@pytest.mark.parametrize(("rate", "least"), [(2.0, "1P1D"), (4.5, "1P2D"), (7.0, "1P3D"), (11.0, "2P5D")])
def test_the_least_split_is_that_of_the_closed_form(rate: float, least: str, tmp_path: Path) -> None:
    """Of x servers that prefill and y that decode each needs less than 1 / rate a request: 0.1 / x and 0.4 / y."""
    of = [Candidate(apart(rate), Server("h100", CARD, 1, {}), prefills=share) for share in searching.SPLITS]
    best = searching.search(of, searching.terms(of, ["e2e.mean<=600ms"]), Runs(Store(tmp_path), Here()))[0]
    fleet = best.scenario.fleet
    assert best.label == f"{least} x h100" and fleet is not None and fleet.hand_off is not None
    assert [pool.role for pool in fleet.pools] == ["prefill", "decode"]
    assert best.span[1] == fleet.count == int(least[0]) + int(least[2])


def test_splits_stand_beside_replicas_and_grow_with_their_number() -> None:
    """With a link each kind of server is also tried apart; both pools have a server, and neither shrinks."""
    of = searching.candidates(apart(2.0), ["h100"], (1,), {})
    assert [each.prefills for each in of] == [*searching.SPLITS, 0]
    assert not any(each.misfit() for each in of)
    for each in of[:-1]:
        values = range(1, each.last + 1)
        pools = [tuple(number for number, _ in each.pools(value)) for value in values]
        assert all(min(pair) >= 1 and sum(pair) == each.count(value) for pair, value in zip(pools, values, strict=True))
        assert all(a <= c and b <= d for (a, b), (c, d) in itertools.pairwise(pools))
        assert each.gpus(each.last) == 8 and each.cards == ["h100"]
    replicas = of[-1].scenario(2).fleet
    assert replicas is not None and replicas.hand_off is None


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"cards": ["l4=1.0"], "model": "llama-3.1-405b"}, "too little for a cache"),
        ({"slo": ["ttft.p99<=1ms"], "most_gpus": 2}, "nothing of up to 2 GPUs keeps the conditions; nearest is"),
        ({"slo": ["tpot.p99<=1ms"], "tensor": [1]}, "reading the weights alone takes"),
        ({"cards": ["l4=0"]}, "got 0, expected l4=USD"),
        (
            {"slo": ["ttft.p99>=60ms"], "tensor": [1], "most_gpus": 4},
            "its means keep them, those of more servers do not",
        ),
        ({"load": LONG, "most_gpus": 2}, "requests refused: prompt of 140000 tokens, max_model_len is 131072"),
        ({"load": LONG, "most_gpus": 4, "tensor": [4, 1]}, "nearest is 1 x h100,"),
        ({"slo": ["tpot.p99<=1s"], "load": SHORT}, "--slo 'tpot.p99<=1s': the runs have no tpot.p99"),
        ({"cards": ["h100", "H100_SXM"]}, "h100-sxm is named twice"),
        ({"cards": ["h101"]}, "unknown hardware 'h101'"),
        ({"cards": []}, "--cards, --tensor, --knob: 0 candidates, expected 1 to 1,000"),
        ({"apart_gb_s": 0.0}, "--apart: got 0, must be > 0"),
        ({"slo": []}, "no condition, expected some such as ttft.p99<=2s"),
        ({"tensor": [0]}, "--tensor 0: needs 0 GPUs, must be from 1"),
        ({"knobs": {"scheduler.max_num_seqs": []}}, "0 candidates, expected 1 to 1,000"),
        ({"slo": ["tpot.p99<=1us"]}, "nearest is 1 x h100 TP8, max_num_batched_tokens=2048: tpot.p99<=1us: reading"),
        ({"cards": ["l4=1"], "model": "llama-3.1-70b", "tensor": [1]}, "the least that would: 4 x a100-40gb"),
        ({"load": "nothing"}, "unknown scenario 'nothing'"),
        ({"knobs": {"scheduler.x": [1]}}, "x"),
    ],
)
def test_mistakes_name_the_nearest_thing(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    usual: dict[str, Any] = {"model": "llama-3.1-8b", "load": LOAD, "slo": ["ttft.p99<=2s"], "cards": ["h100"]}
    with pytest.raises(UserError) as caught:
        cbsim.recommend(**{**usual, "replicates": 2, "store": tmp_path, **change})
    assert says in str(caught.value) and caught.value.exit_status == 2
    assert len(str(caught.value).splitlines()) == 1


WRONG = [
    (["--slo", ""], "--slo '': expected METRIC<VALUE[UNIT]"),
    (["--slo", "tpot.p99<=1us"], "keeps the conditions; nearest is 1 x h100 TP8"),
    (["--slo", "ttft.p98<=1s"], "--slo 'ttft.p98<=1s': ttft needs one of"),
    (["--slo", "slo.attainment>=0.9"], "such as --set slo.ttft_s=2"),
    (["--cards", ""], "--cards '': expected names such as h100,l40s"),
    (["--cards", "h100,"], "--cards 'h100,': expected names such as h100,l40s"),
    (["--cards", "h100,l40s,h100"], "--cards 'h100,l40s,h100': h100-sxm is named twice, expected once"),
    (["--cards", "h100=1,h100-sxm=2"], "h100-sxm is named twice, expected once"),
    (["--cards", "h100,h101"], "cbsim: --cards h101: unknown hardware 'h101' (known: a100-40gb"),
    (["--cards", "h100=0"], "expected h100=USD, above 0"),
    (["--cards", "h100=-2"], "expected h100=USD, above 0"),
    (["--cards", "h100=nan"], "got nan, expected h100=USD, above 0"),
    (["--cards", "h100=1_0"], "got 1_0, expected h100=USD, above 0"),
    (["--cards", "h100=two"], "got two, expected h100=USD, above 0"),
    (["--cards", "h100=1e308"], "got 1e308, expected h100=USD, above 0 and <= 1e+30"),
    (["--cards", "l4=1", "MODEL", "llama-3.1-70b", "--tensor", "1,3"], "the least that would: 2 x h100-sxm"),
    (["--cards", "laptop-cpu"], "has no price, expected laptop-cpu=USD"),
    (["--cards", "rtx-4090", "--tensor", "1", "MODEL", "llama-3.1-70b"], "the least that would: 2 x h100-sxm"),
    (["--cards", "none.yaml"], "none.yaml: no such file"),
    (["--load", "none.yaml"], "cbsim: --load: none.yaml: no such file"),
    (["--load", "none.csv"], "no file 'none.csv'"),
    (["--load", "ratez"], "cbsim: --load: unknown scenario 'ratez'; did you mean rates?"),
    (["--load", "LIST"], "expected fields such as `name: value`"),
    (["--load", "PARTS"], "scheduler: got 'vllm', expected fields"),
    (["--load", "KIND"], "KIND.yaml:1: workload.kind: got 'bursty', expected one of synthetic"),
    (["--knob", "scheduler"], "--knob scheduler: expected FIELD=A..B"),
    (["--knob", "scheduler.max_num_seq=16"], "did you mean max_num_seqs?"),
    (["--knob", "scheduler.max_num_seqs=1_0"], "got '1_0', expected a whole number"),
    (["--knob", "scheduler.max_num_seqs=many"], "got 'many', expected a whole number"),
    (["--knob", "workload.requests=16"], "such as scheduler.max_num_seqs"),
    (["--knob", "hardware.memory_bytes=1,2"], "such as scheduler.max_num_seqs"),
    (["--knob", "foo=1,2"], "--knob foo: unknown field; expected a setting that MODEL"),
    (["--knob", "schedule=1,2"], "--knob schedule: unknown field; did you mean scheduler?"),
    (["--knob", "scheduler.max_num_seqs=1..1001:1", "--tensor", "1"], "1,001 candidates, expected 1 to 1,000"),
    (["--out", "/proc/x"], "--out /proc/x: cannot be written"),
    (["--store", "LIST.yaml"], "--store LIST.yaml: cannot be written"),
    (["--set", "hardware=l4"], "hardware: expected a setting that MODEL, --cards and --tensor do not set"),
    (["--set", "cost.tensor_parallel=2"], "cost.tensor_parallel: expected a setting"),
    (["--set", "model=llama-3.1-70b"], "model: expected a setting"),
    (["--set", "loop.mode=both"], "loop.mode: got both; a capacity is that of one loop, sync or async"),
    (["--set", "nonsense=1"], "nonsense: unknown field"),
    (["--tensor", "3"], "cbsim: --tensor 3: cost.tensor_parallel: got 3, must divide heads (32)"),
    (["--tensor", "8", "--most", "4"], "cbsim: --tensor 8: needs 8 GPUs, must be from 1 to --most (4)"),
    (["--tensor", "16,8", "--most", "4"], "--tensor 8: needs 8 GPUs"),
    (["--knob", "cost.x=1", "--set", "cost.x=2"], "cbsim: --set cost.x: is set by --knob, too; expected one of them"),
    (
        ["--knob", "cost=[{x: 1}]", "--set", "cost.x=2"],
        "cbsim: --set cost.x: is set by --knob, too; expected one of them",
    ),
    (["--apart", "0"], "argument --apart: '0': expected GB/s above 0"),
    (["--apart", "fast"], "argument --apart: 'fast': expected GB/s above 0"),
    (["--set", "fleet.hand_off.lease_s=1"], "fleet.hand_off.lease_s: expected a setting"),
    (["--tensor", "0"], "expected a whole number from 1"),
    (["--confidence", "2"], "expected a share from 0.5"),
    (["--replicates", "1"], "expected a whole number from 2"),
    (["MODEL", "llama-3.1-8x"], "cbsim: MODEL: unknown model 'llama-3.1-8x'; did you mean llama-3.1-8b?"),
    (["MODEL", "none.json"], "none.json: no such file"),
]
FILES = {"LOAD": LOAD["workload"], "LIST": [1], "KIND": {"kind": "bursty"}, "PARTS": {**LOAD, "scheduler": "vllm"}}


@pytest.mark.parametrize(("words", "says"), WRONG, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_a_wrong_command_line_is_one_line(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the mistake and the nearest thing that would do; the search is not announced, no run is made, and the
    status is 2.
    """
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        (tmp_path / name).with_suffix(".yaml").write_text(json.dumps(content))
    usual = {"MODEL": "llama-3.1-8b", "--load": "LOAD", "--slo": "ttft.p99<=2s", "--cards": "h100", "--jobs": "1"}
    usual |= dict(zip(words[::2], words[1::2], strict=True))
    usual["--load"] += ".yaml" if usual["--load"] in FILES else ""
    model = usual.pop("MODEL")
    status, out, err = call("recommend", model, *(word for pair in usual.items() for word in pair))
    lines = [line for line in err.splitlines() if line.startswith(("cbsim: ", "python -m cbsim"))]
    assert (status, out, len(lines)) == (2, "", 1) and says in lines[0], err
    assert "candidates; " not in err
    assert ("the least that would" in err) == ("the least that would" in says)  # of memory only
    assert not list(tmp_path.glob("sweeps/runs/*/*"))


@pytest.mark.parametrize(("within", "line"), [("", 3), ("workload:\n", 4)])
def test_a_mistake_in_a_load_is_told_with_its_line(within: str, line: int, tmp_path: Path) -> None:
    """That of a file of a workload's fields, or of a whole scenario."""
    load, indent = tmp_path / "load.yaml", "  " if within else ""
    fields = ("kind: synthetic", "requests: 6", "arivals: {kind: burst}", "prompt_tokens: 1", "output_tokens: 1")
    load.write_text(within + "".join(f"{indent}{each}\n" for each in fields))
    with pytest.raises(ScenarioError) as caught:
        only(searching.sizing("llama-3.1-8b", load)).scenario(1)
    assert f"{load}:{line}: workload.arivals: unknown field; did you mean arrivals?" in str(caught.value)


def test_the_servers_of_a_load_do_not_count(tmp_path: Path) -> None:
    """A fleet's router stays; its servers, their GPUs, and deaths by their number do not."""
    fleet = {"router": {"name": "round_robin"}, "pools": [{"count": 4, "server": {"hardware": "l4"}}]}
    fleet["failures"] = [{"server": 3, "at_s": 0.1}]  # type: ignore[assignment]
    load = {**LOAD, "fleet": fleet, "hardware": "l4", "cost": {"kind": "roofline", "tensor_parallel": 2}}
    scenario = only(searching.sizing("llama-3.1-8b", load)).scenario(1)
    assert scenario.fleet is not None and (scenario.fleet.router.name, scenario.all_gpus) == ("round_robin", 1)
    assert scenario.hardware == CARD and not scenario.fleet.failures


def test_the_command_writes_a_page_and_scenarios(tmp_path: Path) -> None:
    """Numbers as one object; each answer's scenario is a file that runs."""
    load = tmp_path / "load.yaml"
    load.write_text(json.dumps(LOAD["workload"]))
    words = ["recommend", "llama-3.1-8b", "--load", str(load), "--slo", "ttft.p99<=2s", "--cards", "h100,l40s"]
    more = ["--tensor", "1", "--knob", "scheduler.max_num_seqs=16", "--replicates", "4", "--jobs", "1", "--json"]
    folder = tmp_path / "page"
    made = json.loads(call(*words, *more, "--store", str(tmp_path / "store"), "--out", str(folder)).out)
    first = made["candidates"][0]
    assert first["gpus"] * {"h100": 3.0, "l40s": 1.5}[first["label"].split()[2].strip(",")] == first["usd_hour"]
    assert first["joules_per_output_token"] > 0 and first["least"] <= first["sure"] == first["servers"]
    assert scenarios.load(folder / "scenarios" / "1.yaml").all_gpus == first["gpus"]
    page = (folder / "report.html").read_text()
    links = re.findall(r'(?:href|src)="([^"]*)"', page)
    assert links and all((folder / link).is_file() for link in links)
    answers = [f"{at}: {each['label']}" for at, each in enumerate(made["candidates"], start=1) if each["scenario"]]
    assert re.findall(r'<a href="scenarios/\d+.yaml">([^<]*)</a>', page) == answers
    assert all(each["label"] in page for each in made["candidates"]) and "python -m cbsim recommend" in page
    (folder / "scenarios" / "9.yaml").write_text("of an earlier answer")
    said = call(*words, *more[:-1], "--store", str(tmp_path / "store"), "--out", str(folder))
    assert said.status == 0 and f"page      {folder}/report.html" in said.out
    assert len(list((folder / "scenarios").iterdir())) == len(answers)
