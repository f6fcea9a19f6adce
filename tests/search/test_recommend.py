"""`cbsim recommend`: how many servers of which card, against closed forms and what must hold whatever the numbers."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.calls import call

import cbsim
from cbsim.errors import RunError, ScenarioError
from cbsim.metrics import metrics
from cbsim.record.columns import NS
from cbsim.record.record import STATUSES
from cbsim.scenario import scenario as scenarios
from cbsim.scenario import shapes
from cbsim.scenario.scenario import Scenario
from cbsim.scenario.shapes import Hardware
from cbsim.search import recommend as searching
from cbsim.search import recommended
from cbsim.search.probe import Terms
from cbsim.search.recommend import Candidate, Hunt, Server, Servers, Wish
from cbsim.sweeps.store import Run, Runs, Store
from cbsim.sweeps.work import Here, Task
from cbsim.workload import generators
from cbsim.workload.requests import Streams

SERVICE_S = 1.0
CARD = shapes.hardware("h100-sxm")


# -- queues whose answer is known -------------------------------------------------------------------------------------


def queue(rate: float, seed: int, requests: int) -> Wish:
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
    return searching.wish("llama-3.1-8b", fields, {"loop.mode": "sync"}, 24)


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

    def ahead(self, scenarios: Sequence[Scenario], warmup: float) -> None:
        """Makes nothing beforehand."""

    def of(self, scenarios: Sequence[Scenario], warmup: float) -> list[Run]:
        return [self._run(each, warmup) for each in scenarios]

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


class Quick(Servers):
    """The same scenarios, without being validated again for each number."""

    _least: Scenario | None = None

    def _build(self, count: int) -> Scenario:
        self._least = self._least or super()._build(1)
        fleet = self._least.fleet
        assert fleet is not None
        pools = (fleet.pools[0].model_copy(update={"count": count}), *fleet.pools[1:])
        return self._least.model_copy(update={"fleet": fleet.model_copy(update={"pools": pools})})


def only(card: Hardware = CARD, name: str = "h100") -> Candidate:
    return Candidate(Server(name, card, 1, {}))


def answer(
    wish: Wish, of: Sequence[Candidate], ttft_s: float, runs: Runs, replicates: int = 16, confidence: float = 0.95
) -> list[Hunt]:
    terms = searching.terms(wish, of, [f"ttft.mean<={ttft_s}s"], replicates=replicates, confidence=confidence)
    return searching.search(wish, of, terms, runs)


def test_the_number_is_the_closed_forms_in_a_hundred_of_a_hundred_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates and bounds are drawn; the interval of the number, with a confidence of 99.9 %, has that of the closed form
    in each, and has two numbers at most in nearly all.
    """
    monkeypatch.setattr("cbsim.search.recommend.Servers", Quick)
    drawn, wide = random.Random(41), 0
    for seed in range(100):
        rate, ttft_s = drawn.uniform(0.5, 10), drawn.uniform(1.3, 5)
        best = answer(queue(rate, seed, 4000), [only()], ttft_s, Recursion(), 32, 0.999)[0]
        least, most = best.span
        assert least <= exact(rate, ttft_s) <= (most or 24), (seed, rate, ttft_s)
        wide += most is None or most - least > 1
    assert wide <= 5


def test_simulated_servers_agree_with_the_closed_form(tmp_path: Path) -> None:
    """The same by the simulator itself, with its router and its store."""
    for seed, (rate, ttft_s) in enumerate([(1.7, 2.2), (3.1, 1.6)]):
        runs = Runs(Store(tmp_path), Here())
        best = answer(queue(rate, seed, 600), [only()], ttft_s, runs, 8)[0]
        least, most = best.span
        assert least <= exact(rate, ttft_s) <= (most or 24)
        assert best.at is not None and least <= best.count


# -- what holds whatever the numbers ----------------------------------------------------------------------------------


def test_prices_times_a_factor_leave_the_ranking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cards of one speed whose prices are ties or nearly so: any factor leaves the order, and what is given up."""
    monkeypatch.setattr("cbsim.search.recommend.Servers", Quick)
    prices, drawn = (3.0, 1.5, 1.5, 2.0000001, 7.0), random.Random(1)

    def ranking(factor: float) -> list[tuple[str, bool]]:
        of = [
            only(CARD.model_copy(update={"price_usd_hour": price * factor}), f"card{at}")
            for at, price in enumerate(prices)
        ]
        ranked = answer(queue(2.5, 1, 1000), of, 2.0, Recursion(), 8)
        return [(each.candidate.server.name, each.at is not None) for each in ranked]

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
        of = [only(card, "card"), only(better(card, drawn), "better")]
        ranked = answer(searching.wish("llama-3.1-8b", LOAD, (), 16), of, 0.3, runs, 4)
        names = [each.candidate.server.name for each in ranked if each.candidate.beside is None]
        assert names == ["better", "card"]


def test_two_cards_together_are_a_scenario_that_can_be_run(tmp_path: Path) -> None:
    """The dearer card with a part of the load and a cheap one with the rest; the scenario is read as it was written."""
    cheap = Server("l40s", shapes.hardware("l40s"), 1, {"scheduler.max_num_seqs": 8})
    wish = searching.wish("llama-3.1-8b", LOAD, {"workload.requests": 5}, 16)
    mixed = Servers(Candidate(Server("h100", CARD, 2, {}), (3, cheap)), wish).scenario(2, 4)
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

    def found(name: str, count: int, price: float, **settings: int) -> Hunt:
        card = CARD.model_copy(update={"price_usd_hour": price})
        candidate = Candidate(Server(name, card, 1, settings))
        prober: Any = None
        over = Servers(candidate, searching.wish("llama-3.1-8b", LOAD))
        return Hunt(candidate, range(1, 9), over, prober, 1, likely=count - 1)

    hunts = [found("dear", 3, 3.0), found("cheap", 5, 1.7), found("dear", 4, 3.0, x=1)]
    mixed = searching.mixes(hunts, 8, 1.7)
    assert [each.label(each.first) for each in mixed] == ["2 x dear + 2 x cheap", "1 x dear + 4 x cheap"]


def test_mixtures_that_share_experts_are_candidates_too() -> None:
    wish = searching.wish("qwen3-30b-a3b", LOAD, (), 8)
    of = searching.candidates(wish, [("h100", CARD)], (1, 2), {})
    ranks = [each for each in of if each.ranks]
    assert [list(each.counts(8)) for each in ranks] == [[2, 4, 8], [2, 4, 8], [2, 4], [2, 4]]
    assert Servers(ranks[0], wish).scenario(4, 0).ranks == 4


# -- pruning ----------------------------------------------------------------------------------------------------------


def test_the_data_sheet_rules_out_and_bounds() -> None:
    """Weights that are read longer than a token may take, and a rate whose operations need several cards."""
    wish = searching.wish("llama-3.1-8b", {**LOAD, "loop": {}}, {"workload.arrivals.rate_per_s": 2000}, 64)
    built = Servers(only(), wish).scenario(1, 0)
    with pytest.raises(ScenarioError, match=r"tpot.p99<=1ms: reading the weights alone takes 4.48 ms a token"):
        searching.least(built, only().server, Terms(tuple(cbsim_checks("tpot.p99<=1ms"))))
    requests = generators.build(built).open
    span_s = (requests[-1].arrival_ns - requests[0].arrival_ns) / 1e9
    flop = 2 * built.model.layer_parameters * 544 * 60
    expected = math.ceil(flop / CARD.flops.bfloat16 / span_s)
    assert searching.least(built, only().server, Terms(tuple(cbsim_checks("tpot.p99<=1s")))) == expected > 8


def cbsim_checks(*rules: str) -> list[Any]:
    from cbsim.metrics.checks import parse

    return [parse(rule) for rule in rules]


class Counted(Here):
    """An executor that counts its tasks."""

    tasks = 0

    def give(self, task: Task) -> None:
        Counted.tasks += 1
        super().give(task)


def test_a_second_search_makes_no_run(tmp_path: Path) -> None:
    """Runs are in the store, so a search that was interrupted goes on, and another goal uses what is there."""
    wish = searching.wish("llama-3.1-8b", LOAD, (), 8)
    texts = []
    for _ in range(2):
        of = [only()]
        precision = {"replicates": 4}
        texts.append(str(recommended.recommend(wish, of, ["ttft.p99<=2s"], precision, tmp_path, Counted())))
        if len(texts) == 1:
            made = Counted.tasks
    assert Counted.tasks == made > 0 and texts[0] == texts[1]


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
    assert best.sure is not None and best.count > 1 and best.span == (best.count, best.count)
    assert [len(best.runs), best.binds] == [1, "TTFT (queue)"] and "without an interval" in str(answer)


def test_a_candidate_whose_runs_fail_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are answered; of the one that failed the reason is said."""
    pilot = searching.Prober.pilot

    def failing(self: Any, value: float) -> Any:
        if self._over._candidate.server.name == "b":
            raise RunError("the process died")
        return pilot(self, value)

    monkeypatch.setattr(searching.Prober, "pilot", failing)
    wish = searching.wish("llama-3.1-8b", LOAD, (), 8)
    ranked = answer(wish, [only(), only(name="b")], 2.0, Runs(Store(tmp_path), Here()), 4)
    assert [each.candidate.server.name for each in ranked] == ["h100", "b"]
    assert ranked[1].out == "its runs fail: the process died" and ranked[1].at is None


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"cards": ["l4"], "prices": {"l4": 1.0}, "model": "llama-3.1-405b"}, "none holds llama-3.1-405b, 8 together"),
        ({"slo": ["ttft.p99<=1ms"], "most_gpus": 2}, "nothing of up to 2 GPUs keeps the conditions; nearest is"),
        ({"slo": ["tpot.p99<=1ms"], "tensor": [1]}, "reading the weights alone takes"),
        ({"cards": ["l4"]}, "has no price, needs --price l4=USD"),
        ({"cards": ["h101"]}, "unknown hardware 'h101'"),
        ({"prices": {"h200": 1.0}}, "--price h200: expected one of the cards h100"),
        ({"cards": []}, "expected names such as h100,l40s"),
        ({"load": "nothing"}, "unknown scenario 'nothing'"),
        ({"knobs": {"scheduler.x": [1]}}, "x"),
    ],
)
def test_mistakes_name_the_nearest_thing(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    usual: dict[str, Any] = {"model": "llama-3.1-8b", "load": LOAD, "slo": ["ttft.p99<=2s"], "cards": ["h100"]}
    with pytest.raises(ScenarioError) as caught:
        cbsim.recommend(**{**usual, "replicates": 2, "store": tmp_path, **change})
    assert says in str(caught.value) and caught.value.exit_status == 2
    assert len(str(caught.value).splitlines()) == 1


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
    page = (folder / "report.md").read_text()
    assert "scenarios/1.yaml" in page and "figures/price.png" in page
    assert scenarios.load(folder / "scenarios" / "1.yaml").all_gpus == first["gpus"]
