"""`cbsim recommend`: which cards, how many, and with which settings serve a load within conditions, by price.

A candidate is a card, the GPUs that share a model's layers, and settings; the least number of its servers that keeps
the conditions is sought. The data sheet rules out what cannot do. Two runs a number locate the least one; it and the
one below get further runs, look by look, until an interval decides. The best of two cards are tried together, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, product, takewhile
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from cbsim.errors import RunError, ScenarioError, beginning
from cbsim.files import real
from cbsim.metrics.terminal import lookup
from cbsim.record.columns import NS
from cbsim.scenario import catalog, documents, shapes
from cbsim.scenario.documents import Document
from cbsim.scenario.fields import LARGEST_REAL, bare, cut, near, shown
from cbsim.scenario.fleet import SERVER
from cbsim.scenario.overrides import Changes, fields_of, written
from cbsim.scenario.scenario import Scenario, Variants
from cbsim.scenario.shapes import Hardware
from cbsim.search.capacity import limit
from cbsim.search.probe import PILOTS, Probe, Prober, Terms, Value
from cbsim.search.probe import terms as terms_of
from cbsim.stats import intervals
from cbsim.stats.intervals import Interval
from cbsim.sweeps.store import Run, Runs
from cbsim.sweeps.sweep_file import check_once
from cbsim.workload import generators

TENSOR = (1, 2, 4, 8)
BATCHES = {"scheduler.max_num_batched_tokens": (2048, 8192)}  # of vLLM, if no knob is named
SHEET = ("roofline", "table")  # costs that are never below the data sheet's
PARALLEL = ("tensor_parallel", "data_parallel")  # of a cost
SOUGHT = ("hardware", "fleet.pools", "fleet.hand_off", *(f"cost.{name}" for name in PARALLEL))  # that the search sets
ROLES = ("prefill", "decode")
SPLITS = (0.25, 1 / 3, 0.5, 2 / 3, 0.75)  # shares of servers that prefill, where prefill and decode are apart
REACH = 3  # numbers of servers that may be decided by intervals on each side of the likely one
DEARER = 3.0  # candidates that cost so many times the cheapest, or more than the cheapest of their card, are left
MIXES = 2  # of two cards
MOST = 1000  # kinds of servers


class Sizing(NamedTuple):
    """What is to be served: the fields of a scenario but for its servers, the folder of their paths, and the bounds.
    With `hand_off`, the fields of how KV goes over, prefill and decode may be apart.
    """

    document: Document
    folder: Path
    changes: Changes
    most_gpus: int
    hand_off: Mapping[str, Any] | None = None


class Server(NamedTuple):
    """A kind of server: a card by the name that the user wrote, the GPUs that share each layer, settings, stages."""

    name: str
    card: Hardware
    tensor: int
    settings: Mapping[str, Any]
    stages: int = 1

    @property
    def gpus(self) -> int:
        return self.tensor * self.stages


@dataclass(frozen=True, eq=False)
class Candidate:
    """Servers of a kind, whose number is sought: behind a router, with servers of other kinds `beside` them; or as
    `ranks`, which step together and share experts, and whose number is 2 to the power of the value that is sought; or
    apart, with a share of `prefills`, whose number, that of both pools, is one more. The search begins with `first`.
    """

    sizing: Sizing
    server: Server
    beside: tuple[tuple[int, Server], ...] = ()
    ranks: bool = False
    prefills: float = 0.0
    first: int = 1
    built: dict[int, Scenario] = field(default_factory=dict, init=False)

    def count(self, value: int) -> int:
        return 2**value if self.ranks else value + 1 if self.prefills else value

    def pools(self, value: int) -> list[tuple[int, Server]]:
        count = self.count(value)
        if self.prefills:
            first = min(max(round(self.prefills * count), 1), count - 1)
            return [(first, self.server), (count - first, self.server)]
        return [(count, self.server), *self.beside]

    def gpus(self, value: int) -> int:
        return sum(number * server.gpus for number, server in self.pools(value))

    def usd_hour(self, value: int) -> float:
        """Return the price to nine digits: equal prices stay equal whatever they are multiplied by."""
        prices = [number * server.gpus * (server.card.price_usd_hour or 0) for number, server in self.pools(value)]
        return float(f"{sum(prices):.9g}")

    def label(self, value: int) -> str:
        names = list[str]()
        pools = self.pools(value)
        for number, (name, _, tensor, settings, _) in pools[:1] if self.prefills else pools:
            chosen = [f", {field.rpartition('.')[2]}={setting}" for field, setting in settings.items()]
            many = f"{number}P{pools[1][0]}D" if self.prefills else number
            names.append(f"{many} x {name}{f' TP{tensor}' if tensor > 1 else ''}{''.join(chosen)}")
        return " + ".join(names) + (", as ranks" if self.ranks else "")

    @property
    def cards(self) -> list[str]:
        return list(dict.fromkeys(server.name for _, server in self.pools(1)))

    @cached_property
    def last(self) -> int:
        """The most that may be sought, by the GPUs in all; of ranks also by the model and the link."""
        most = (self.sizing.most_gpus - self.gpus(1)) // self.server.gpus + self.count(1)
        if not self.ranks:
            return most + 1 - self.count(1)
        return len(list(takewhile(lambda value: not self.misfit(value), range(1, most.bit_length()))))

    def misfit(self, value: int = 1) -> str:
        """Return why there is no such scenario; empty if there is one."""
        try:
            self.scenario(value)
        except ScenarioError as error:
            whole, _, of_a_server = str(error).splitlines()[0].partition("fleet.pools.0.server.")
            return of_a_server or whole.replace("--set cost.tensor_parallel=", "--tensor ")
        return ""

    def scenario(self, value: Value, replicate: int = 0) -> Scenario:
        """Return the scenario of so many servers, its seed increased by `replicate`. Raises ScenarioError."""
        built = self.built.get(int(value)) or self._build(int(value))
        self.built[int(value)] = built
        return built.model_copy(update={"seed": built.seed + replicate}) if replicate else built

    def _build(self, value: int) -> Scenario:
        fields, pools, changes = dict(self.sizing.document.data), list[dict[str, Any]](), dict[str, Any]()
        fleet = _part(fields, "fleet")
        cost = {name: setting for name, setting in _part(fields, "cost").items() if name not in PARALLEL}
        fields["cost"] = {"kind": "roofline", **cost}
        several = any(server.tensor > 1 for _, server in self.pools(value))
        for at, (number, server) in enumerate(self.pools(value)):
            own = {"hardware": server.card.model_dump(mode="json")}
            within = f"fleet.pools.{at}.server." if at else ""
            fields = fields if at else fields | own
            apart = {"name": ROLES[at], "role": ROLES[at]} if self.prefills else {}
            pools.append({"count": number, "name": server.name, "server": own if at else {}, **apart})
            shared = {"cost.tensor_parallel": server.tensor} if several else {}
            changes |= {within + name: setting for name, setting in {**server.settings, **shared}.items()}
        sought = {"failures": [], "pools": pools, "hand_off": self.sizing.hand_off if self.prefills else None}
        fields["fleet"] = {"router": {"name": "least_in_flight"}, **fleet, **sought}
        if self.ranks:
            fields["fleet"], changes["cost.data_parallel"] = None, 2**value
        overrides = [*written(self.sizing.changes), *written(changes)]
        return Variants(replace(self.sizing.document, data=fields), self.sizing.folder)(overrides)


def _part(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a part of a scenario, empty if it has none. Raises ScenarioError."""
    part = fields.get(name) or {}
    if not isinstance(part, Mapping):
        raise ScenarioError(f"--load: {name}: got {shown(part)}, expected fields", field=name, value=part)
    return part


class Search:
    """The search for the least value of a candidate that keeps the conditions: `low` is the largest that fails by its
    means, or by the data sheet, and `likely` the least one above; `fails` is the largest that surely fails and `sure`
    the least that surely holds. `out` states why there is no answer.
    """

    def __init__(self, candidate: Candidate, terms: Terms, runs: Runs) -> None:
        self.candidate, self.terms, self.last = candidate, terms, candidate.last
        self.prober = Prober(candidate.scenario, "servers", terms, runs)
        self.probes: dict[int, Probe] = {}
        self.likely: int | None = None
        self.sure: int | None = None
        self._start, self.out = by_data_sheet(candidate, terms)
        self.low = self.fails = self._start - 1

    def steps(self) -> Iterator[tuple[int, int | None]]:
        """Yield a value, and the look or None for pilots, of each probe that the search needs."""
        at, stride = max(self._start, self.candidate.first), 1
        while self.low < self.last and (self.likely is None or self.likely - self.low > 1):
            yield at, None
            at = min(at + stride, self.last) if self.likely is None else (self.low + self.likely) // 2
            stride *= 2
        if self.likely is not None:
            yield from self._decided(range(self.likely, min(self.likely + REACH, self.last + 1)), until=True)
        if self.likely is None:
            self.out = f"no number up to {self.candidate.count(max(self.probes))} holds"
        else:
            yield from self._decided(range(self.likely - 1, max(self.fails, self.likely - 1 - REACH), -1), until=False)

    def _decided(self, values: Sequence[int], *, until: bool) -> Iterator[tuple[int, int]]:
        """Decide one value after the other, until one surely holds, or surely fails."""
        for at in values:
            for look in range(len(self.terms.looks)):
                yield at, look
                if self.probes[at].holds is not None:
                    break
            if self.probes[at].holds is until:
                return

    def needed(self, at: int, look: int | None) -> list[Scenario]:
        count = min(PILOTS, self.terms.looks[-1]) if look is None else self.terms.looks[look]
        return [self.candidate.scenario(at, seed) for seed in range(count)]

    def probe(self, at: int, look: int | None) -> None:
        try:
            self.probes[at] = self.prober.pilot(at) if look is None else self.prober.look(at, look)
        except RunError as error:
            self.out = f"its runs fail: {error}"
        probes = self.probes.items()
        self.low = max([self._start - 1, *(value for value, probe in probes if probe.excess > 0)])
        self.likely = min((value for value in self.probes if value > self.low), default=None)
        self.fails = max([self._start - 1, *(value for value, probe in probes if probe.holds is False)])
        self.sure = min((value for value, probe in probes if probe.holds), default=None)

    @property
    def answered(self) -> bool:
        return not self.out and self.likely is not None

    @property
    def at(self) -> int:
        """The value that surely holds, or else likely does; without an answer the least that may, by means."""
        if self.out or self.likely is None:
            return min(self.low + 1, self.last)
        return self.likely if self.sure is None else self.sure

    @property
    def span(self) -> tuple[int, int | None]:
        """The interval of the least number of servers that do; its upper end is None if none surely does."""
        return self.candidate.count(self.fails + 1), self.sure and self.candidate.count(self.sure)

    @property
    def usd_hour(self) -> float:
        return self.candidate.usd_hour(self.at)

    @property
    def label(self) -> str:
        return self.candidate.label(self.at)

    @property
    def binds(self) -> str:
        """What keeps one server fewer from doing: the metric and its cause, or the rate by the data sheet."""
        if not self.answered or self.at == 1:
            return "-"
        if (below := self.probes.get(self.at - 1)) is None:
            return "rate (data sheet)"
        names = dict.fromkeys(check.spelled.partition(".")[0].upper() for check in below.broken)
        cause = limit(below).word
        return f"{', '.join(names) or ('memory' if cause in ('KV', 'refused') else 'margin')} ({cause})"

    @property
    def scenario(self) -> Scenario:
        return self.candidate.scenario(self.at)

    @property
    def runs(self) -> Sequence[Run]:
        return self.prober.known[self.at] if self.answered else ()

    def interval(self, name: str) -> Interval | None:
        """Return the mean of a metric over the answer's runs, with its own interval; None if runs lack it."""
        values = [value for run in self.runs if (value := lookup(run.summary, name)) is not None]
        return intervals.shown_interval(values, self.terms.confidence) if values else None

    @property
    def joules(self) -> float | None:
        """An estimate of the energy of an output token: the power that boards may draw, while their GPUs are active."""
        each = [math.nan] * (not self.runs)
        for run in self.runs:
            active = [one["gpu_active"] for one in run.summary.get("per_server") or [run.summary]]
            servers = zip(self.scenario.replicas(run.summary), active, strict=True)
            watts = [(of.hardware.power_w or math.nan) * of.own_gpus * share for of, share in servers]
            each.append(sum(watts) * run.summary["makespan_s"] / max(1, run.summary["output_tokens"]))
        return None if math.isnan(fmean(each)) else fmean(each)


def sizing(
    model: str,
    load: str | Path | Mapping[str, Any],
    changes: Changes = (),
    most_gpus: int = 64,
    apart_gb_s: float | None = None,
) -> Sizing:
    """Return what is to be served. `load` is a scenario, by name or file, or a file of the fields of its workload, or
    these; the model and servers of a scenario do not count, but for how its fleet hands KV over. `apart_gb_s` is the
    bandwidth of a server's NIC. Raises ScenarioError.
    """
    if apart_gb_s is not None and not 0 < apart_gb_s <= LARGEST_REAL:
        bound = f"must be > 0 and <= {LARGEST_REAL:g}, GB/s of a server's NIC"
        raise ScenarioError(f"--apart: got {apart_gb_s:g}, {bound}", field="apart", value=apart_gb_s, bound=bound)
    folder = Path()
    if isinstance(load, Mapping):
        document = Document("load", None, dict(load))
    elif Path(load).suffix == ".csv":
        document = Document("--load", None, {"kind": "csv", "path": str(load)})
    else:
        with beginning("--load", field="load"):
            path = catalog.scenario(load)
        document, folder = documents.read(path), path.parent
    document = document if "workload" in document.data else document.within("workload")
    about = {"name": "recommended", "question": f"Which servers of {model} keep the conditions at the least price?"}
    loop = {"mode": "async"} | {name: value for name, value in _part(document.data, "loop").items() if value != "both"}
    data = {**document.data, **about, "model": model, "loop": loop}
    hand_off = dict(_part(_part(document.data, "fleet"), "hand_off"))
    if apart_gb_s is not None:
        hand_off["link"] = {**_part(hand_off, "link"), "bandwidth_gb_s": apart_gb_s}
    return Sizing(replace(document, data=data), folder, changes, most_gpus, hand_off or None)


def candidates(
    sizing: Sizing, cards: Sequence[str], tensor: Sequence[int], knobs: Mapping[str, Sequence[Any]]
) -> list[Candidate]:
    """Return each card with each number of GPUs that share a model and each combination of the knobs' values; of a
    mixture also as ranks; if KV can be handed over, also with prefill and decode apart. Raises ScenarioError.
    """
    _check_fields(sizing, knobs)
    knobs = knobs or _usual_knobs(sizing)
    splits = SPLITS if sizing.hand_off else ()
    if not 1 <= (number := len(cards) * len(tensor) * math.prod(map(len, knobs.values())) * (1 + len(splits))) <= MOST:
        raise ScenarioError(f"--cards, --tensor, --knob: {number:,} candidates, expected 1 to {MOST:,}", value=number)
    settings = [dict(zip(knobs, values, strict=True)) for values in product(*knobs.values())]
    servers = [
        Server(name, card, gpus, chosen, _stages({**_stated(sizing), **chosen}))
        for (name, card), gpus, chosen in product(_cards(cards), tensor, settings)
    ]
    with beginning("MODEL", field="model"):
        model = shapes.model(str(sizing.document.data["model"]), sizing.folder)
    ranks = (False, True) if model.experts else (False,)
    made = [Candidate(sizing, server, ranks=each) for server in servers for each in ranks]
    made = [*(Candidate(sizing, server, prefills=share) for server in servers for share in splits), *made]
    if fit := [each for each in made if 0 < each.gpus(1) <= sizing.most_gpus]:
        return fit
    needs, bound = min(each.gpus(1) for each in made), f"must be from 1 to --most ({sizing.most_gpus})"
    raise ScenarioError(f"--tensor {min(tensor)}: needs {needs} GPUs, {bound}", field="tensor", bound=bound)


def _usual_knobs(sizing: Sizing) -> Mapping[str, Sequence[Any]]:
    """Return the knobs if none is named: those of vLLM, unless the load or a change states them."""
    stated = _stated(sizing)
    usual = stated.get("scheduler.name", "vllm") == "vllm" and stated.get("cost.kind", "roofline") in SHEET
    return BATCHES if usual and not stated.keys() & {"scheduler", *BATCHES} else {}


def _stated(sizing: Sizing) -> dict[str, Any]:
    """Return the fields of scheduler and cost that the load or a change states."""
    parts = [(part, _part(sizing.document.data, part)) for part in ("scheduler", "cost")]
    stated = {f"{part}.{name}": value for part, of in parts for name, value in of.items() if value is not None}
    return stated | fields_of(sizing.changes)


def _stages(stated: Mapping[str, Any]) -> int:
    """Return the stages of a server's pipeline; a wrong number is refused when the scenario is built."""
    stages = stated.get("cost.pipeline_parallel", 1)
    return max(1, stages) if isinstance(stages, int) else 1


def _check_fields(sizing: Sizing, knobs: Mapping[str, Sequence[Any]]) -> None:
    """Raise ScenarioError for a change of what the search sets, or a knob that is no setting of a server."""
    axes = [[{name: value} for value in values] or [{}] for name, values in knobs.items()]
    check_once(fields_of(sizing.changes), axes, "--set", "--knob")
    bound = "expected a setting that MODEL, --cards and --tensor do not set, such as scheduler.max_num_seqs"
    for name in (*fields_of(sizing.changes), *knobs):
        sought = name == "model" or any(f"{name}.".startswith(f"{field}.") for field in SOUGHT)
        option, head = "--knob" if name in knobs else "--set", name.partition(".")[0]
        if sought or (name in knobs and head not in SERVER):
            unknown = "" if head in Scenario.model_fields else f"unknown field{near(head, SERVER)}; "
            raise ScenarioError(f"{option} {name}: {unknown}{bound}", field=name, bound=bound)


def _cards(names: Sequence[str]) -> Iterator[tuple[str, Hardware]]:
    """Yield GPUs by name, with `=` and a price or with that of their file; a name may leave out what follows a dash if
    that is the only such one. Raises ScenarioError.
    """
    known, named = catalog.names("hardware"), set[str]()
    for name, _, price in (each.partition("=") for each in names):
        longer = [each for each in known if bare(each) == bare(name) or each.startswith(f"{name.lower()}-")]
        whole = longer[0] if len(longer) == 1 and name not in known else name
        if not name or whole in named:
            bound = f"{whole} is named twice, expected once" if name else "expected names such as h100,l40s"
            raise ScenarioError(f"--cards {','.join(names)!r}: {bound}", field="cards", bound=bound)
        named.add(whole)
        with beginning(f"--cards {name}", field="cards"):
            card = shapes.hardware(whole)
        usd = real(price) if price else card.price_usd_hour or 0.0
        if not 0 < usd <= LARGEST_REAL:
            bound = f"expected {name}=USD, above 0 and <= {LARGEST_REAL:g}, for an hour of a GPU"
            got = f"got {cut(price)}" if price else f"{card.name} has no price"
            raise ScenarioError(f"--cards {name}: {got}, {bound}", field="cards", value=price, bound=bound)
        yield Path(name).stem, card.model_copy(update={"price_usd_hour": usd})


def terms(of: Sequence[Candidate], slo: Sequence[str], **precision: Any) -> Terms:
    """Return the terms of a search. Raises a ScenarioError with the nearest thing that would do if no candidate can be
    built, as if no card can hold the model; CheckError.
    """
    first = next((each for each in of if not each.misfit()), None)
    if first is None:
        raise _unfit(of)
    pairs = math.comb(len({each.server.name for each in of}), 2)
    parts, built = (len(of) + MIXES * pairs) * 2 * REACH, first.scenario(1)
    return terms_of(built, slo, None, "--slo", **precision, parts=parts, still=generators.still(built))


def _unfit(of: Sequence[Candidate]) -> ScenarioError:
    """Return why no candidate can be built, for lack of memory with the least card of ours with which one can."""
    little = [each for each in of if "of the memory leaves" in each.misfit()]
    last, known = [*of, *little][-1], catalog.names("hardware") if little else ()
    sizes = [(shapes.hardware(name), name, tensor) for name in known for tensor in TENSOR]
    for card, name, tensor in sorted(sizes, key=lambda size: (size[0].memory_bytes * size[2], size[2])):
        server = last.server._replace(card=card, tensor=tensor)
        if tensor <= last.sizing.most_gpus and not replace(last, server=server).misfit():
            names, bound = dict.fromkeys(each.server.name for each in of), f"the least that would: {tensor} x {name}"
            return ScenarioError(f"--cards {','.join(names)}: {last.misfit()}; {bound}", field="cards", bound=bound)
    return ScenarioError(last.misfit())


def by_data_sheet(candidate: Candidate, terms: Terms) -> tuple[int, str]:
    """Return the least number of servers for the operations of the load's tokens over its span, and why no number can
    do, if the rate needs more than may be, or a condition on TPOT is shorter than reading the weights alone.
    """
    if misfit := candidate.misfit():
        return 1, misfit
    scenario, tensor = candidate.scenario(1), candidate.server.tensor
    if scenario.cost.kind not in SHEET or candidate.beside or candidate.ranks:
        return 1, ""
    model, card = scenario.model, scenario.hardware
    unread = 1 - model.experts_per_token / model.experts if model.experts else 0.0
    table = 0 if model.tied_embeddings else model.vocab * model.hidden * model.dtype_bytes
    read_s = (model.weight_bytes - unread * model.expert_bytes - table) / (card.memory_bandwidth_bytes_s * tensor)
    for check in terms.conditions:
        if check.metric.startswith("tpot_s.") and check.compare[0] == "<" and read_s > check.bound:
            return 1, f"{check.rule}: reading the weights alone takes {check.shown(read_s)} a token"
    weights = model.layer_parameters - unread * model.expert_parameters
    bound, most = 1 if terms.still else _by_operations(scenario, weights), candidate.count(candidate.last)
    too_many = f"the rate needs {bound} servers by the data sheet, {most} may be" if bound > most else ""
    return max(1, min(bound, most) + 1 - candidate.count(1)), too_many


def _by_operations(scenario: Scenario, weights: float) -> int:
    """Return the servers whose peak is the rate of operations of a load, for each token that is computed 2 a weight."""
    requests = generators.build(scenario).open
    fresh = sum(each.output_tokens + (0 if each.prefix or each.sample_of else each.prompt_tokens) for each in requests)
    span_s = (requests[-1].arrival_ns - requests[0].arrival_ns) / NS if requests else 0.0
    rate = scenario.hardware.flops.of_layers(scenario.model) * scenario.own_gpus
    return max(1, math.ceil(2 * weights * fresh / (rate * span_s))) if span_s else 1


def _race(searches: Sequence[Search], earlier: Sequence[Search], runs: Runs) -> None:
    """Search all numbers at once, probe by probe, so that the runs of one round may be made beside each other. Those
    that cost DEARER times the cheapest that holds, by means, or more than the cheapest of their card, get no more.
    """
    walks = {each: each.steps() for each in searches if not each.out}
    while steps := {each: step for each, walk in walks.items() if not each.out and (step := next(walk, None))}:
        with suppress(RunError):  # the probe that needs the run has it again
            runs.of([run for each, step in steps.items() for run in each.needed(*step)], searches[0].terms.warmup)
        for each, step in steps.items():
            each.probe(*step)
        _leave(list(steps), [each for each in (*earlier, *searches) if each.answered])


def _leave(searches: Sequence[Search], answers: Sequence[Search]) -> None:
    for each in searches:
        alike = [other.candidate.cards == each.candidate.cards for other in answers]
        bounds = [other.usd_hour * (1 if same else DEARER) for other, same in zip(answers, alike, strict=True)]
        floor = each.candidate.usd_hour(min(each.low + 1, each.at))
        if not each.out and floor > min(bounds, default=math.inf):
            each.out = f"dearer: $ {floor:,.2f} an hour or more"


def mixes(searches: Sequence[Search]) -> list[Candidate]:
    """Return candidates of two cards, each of its cheapest kind: the cheapest if capacities are in proportion."""
    best, chosen = dict[str, Search](), list[Candidate]()
    for each in sorted(searches, key=lambda each: each.usd_hour):
        if not each.candidate.ranks and not each.candidate.prefills:
            best.setdefault(each.candidate.server.name, each)
    for one, other in combinations(best.values(), 2):  # the first costs less
        made = []
        for number in range(1, one.at):
            first = math.ceil(other.at * (1 - number / one.at) - 1e-9)
            made.append(replace(other.candidate, beside=((number, one.candidate.server),), first=first))
        fit = [each for each in made if each.gpus(each.first) <= each.sizing.most_gpus]
        chosen += sorted(fit, key=lambda each: each.usd_hour(each.first))[:MIXES]
    return chosen


def search(of: Sequence[Candidate], terms: Terms, runs: Runs) -> list[Search]:
    """Return all searches, ranked. Raises CheckError, or ScenarioError with the nearest if nothing holds."""
    searches = [Search(each, terms, runs) for each in of]
    _race(searches, [], runs)
    answers = [each for each in searches if each.answered]
    if not answers:
        raise _nothing(searches)
    mixed = [Search(each, terms, runs) for each in mixes(answers)]
    _race(mixed, searches, runs)

    def rank(each: Search) -> tuple[bool, bool, float, float]:
        excess = each.probes[each.at].excess if each.answered else 0.0
        return not each.answered, each.sure is None, each.usd_hour, excess

    ranked = dict[str, Search]()  # few servers apart are the same with several shares
    for each in sorted([*searches, *mixed], key=rank):
        ranked.setdefault(each.label, each)
    return list(ranked.values())


def _nothing(searches: Sequence[Search]) -> ScenarioError:
    """Return that no candidate keeps the conditions, with the one that comes nearest."""
    each = max(searches, key=lambda each: each.usd_hour)
    nearest = f"{each.label}: {each.out}"
    if probed := [(each, probe) for each in searches for probe in each.probes.values()]:
        each, probe = min(probed, key=lambda entry: (entry[1].excess, entry[0].candidate.usd_hour(int(entry[1].value))))
        values = [f"{check.spelled} of {check.shown(at.mean)}" for check, at in probe.estimates]
        lost = next((text for text in probe.limits if text.startswith("lost: ")), str(probe.reason))
        nearest = f"{each.candidate.label(int(probe.value))} with {', '.join(values) or lost.removeprefix('lost: ')}"
        if probe.excess <= 0:
            doubt = "those of more servers do not" if each.low > probe.value else "which is not sure"
            nearest += f": its means keep them, {doubt}"
    text = f"--slo: nothing of up to {each.candidate.sizing.most_gpus} GPUs keeps the conditions; nearest is {nearest}"
    return ScenarioError(text, field="slo", bound=nearest)
