"""`cbsim recommend`: which cards, how many, and with which settings serve a load within conditions, by price.

A candidate is a card, the GPUs that share a model's layers, and settings; the least number of its servers that keeps
the conditions is sought. The data sheet rules out what cannot do. Two runs a number locate the least one; it and the
one below get further runs, look by look, until an interval decides. The best of two cards are tried together, too.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from cbsim.errors import RunError, ScenarioError
from cbsim.metrics.terminal import lookup
from cbsim.scenario import catalog, documents, shapes
from cbsim.scenario.documents import Document
from cbsim.scenario.overrides import Changes, written
from cbsim.scenario.scenario import Scenario, Variants
from cbsim.scenario.shapes import Hardware
from cbsim.search.capacity import limit
from cbsim.search.probe import PILOTS, Probe, Prober, Terms, Value
from cbsim.search.probe import terms as terms_of
from cbsim.stats import intervals
from cbsim.stats.intervals import Interval
from cbsim.sweeps.store import Run, Runs
from cbsim.workload import generators

TENSOR = (1, 2, 4, 8)
BATCHES = {"scheduler.max_num_batched_tokens": (2048, 8192)}  # of vLLM, if no knob is named
SHEET = ("roofline", "table")  # costs that are never below the data sheet's
PARALLEL = ("tensor_parallel", "data_parallel")  # of a cost
LOOKED = 6  # numbers of servers of a candidate that may be decided by intervals
DEARER = 3.0  # candidates that cost so many times the cheapest, or more than the cheapest of their card, are left
MIXES = 2  # of two cards
COST = "cost.usd_per_million_output_tokens"


class Wish(NamedTuple):
    """What is to be served: the fields of a scenario but for its servers, the folder of their paths, and the bounds."""

    fields: Mapping[str, Any]
    folder: Path
    changes: Changes
    most_gpus: int


class Server(NamedTuple):
    """A kind of server: a card by the name that the user wrote, the GPUs that share its layers, and settings."""

    name: str
    card: Hardware
    tensor: int
    settings: Mapping[str, Any]

    @property
    def usd_hour(self) -> float:
        return self.tensor * (self.card.price_usd_hour or 0.0)

    def label(self, count: int) -> str:
        settings = [f", {name.rpartition('.')[2]}={value}" for name, value in self.settings.items()]
        return f"{count} x {self.name}{f' TP{self.tensor}' if self.tensor > 1 else ''}{''.join(settings)}"

    def fields(self, beside: int = 1) -> dict[str, Any]:
        """Return the fields of a scenario, or of a pool's server, that make it this kind; `beside` is the number of
        GPUs that share the model in the scenario's other servers.
        """
        nested: dict[str, Any] = {"hardware": self.card.model_dump(mode="json")}
        sharing = {"cost.tensor_parallel": self.tensor} if max(self.tensor, beside) > 1 else {}
        for name, value in {**self.settings, **sharing}.items():
            *parts, last = name.split(".")
            inner = nested
            for part in parts:
                inner = inner.setdefault(part, {})
            inner[last] = value
        return nested


class Candidate(NamedTuple):
    """Servers of a kind, whose number is sought: behind a router, `beside` so many of another kind; or `ranks`, which
    step together and share experts. The search begins with `first` of them.
    """

    server: Server
    beside: tuple[int, Server] | None = None
    ranks: bool = False
    first: int = 1

    @property
    def kinds(self) -> tuple[str, ...]:
        """The names of its cards."""
        return (self.server.name, *([self.beside[1].name] if self.beside else []))

    def counts(self, most_gpus: int) -> Sequence[int]:
        left = most_gpus - (self.beside[0] * self.beside[1].tensor if self.beside else 0)
        most = left // self.server.tensor
        return [2**power for power in range(1, most.bit_length())] if self.ranks else range(1, most + 1)

    def usd_hour(self, count: int) -> float:
        return count * self.server.usd_hour + (self.beside[0] * self.beside[1].usd_hour if self.beside else 0.0)

    def gpus(self, count: int) -> int:
        return count * self.server.tensor + (self.beside[0] * self.beside[1].tensor if self.beside else 0)

    def label(self, count: int) -> str:
        beside = f" + {self.beside[1].label(self.beside[0])}" if self.beside else ""
        return f"{self.server.label(count)}{beside}{', as ranks' if self.ranks else ''}"


class Servers:
    """The scenarios of a candidate by the number of its servers. Raises ScenarioError if there is none."""

    unit = "servers"

    def __init__(self, candidate: Candidate, wish: Wish) -> None:
        self._candidate, self._wish = candidate, wish
        self._built: dict[Value, Scenario] = {}

    def scenario(self, value: Value, replicate: int) -> Scenario:
        """Return the scenario of so many servers, its seed increased by `replicate`."""
        if value not in self._built:
            self._built[value] = self._build(int(value))
        built = self._built[value]
        return built.model_copy(update={"seed": built.seed + replicate}) if replicate else built

    def alone(self, replicate: int) -> None:
        """Return no scenario: requests alone say nothing of the number of servers."""

    def _build(self, count: int) -> Scenario:
        server, beside, ranks, _ = self._candidate
        base, own = dict(self._wish.fields), server.fields()
        sharing = {**own.pop("cost", {}), **({"data_parallel": count} if ranks else {})}
        base["hardware"] = own.pop("hardware")
        cost = base.get("cost") or {"kind": "roofline"}
        base["cost"] = {name: cost[name] for name in cost if name not in PARALLEL} | sharing
        fleet = base.pop("fleet", None) or {}
        if not ranks:
            pools = [{"count": count, "name": server.name}]
            if beside:
                fields = beside[1].fields(server.tensor)
                pools.append({"count": beside[0], "name": beside[1].name, "server": fields})
            base["fleet"] = {"router": {"name": "least_in_flight"}, **fleet, "pools": pools}
        overrides = [*written(self._wish.changes), *written(dict(server.settings))]
        return Variants(Document("scenario", None, base), self._wish.folder)(overrides)


Steps = Generator[tuple[int, int | None], Probe, None]
"""Positions to be probed, each with the look, or None for pilots."""


@dataclass(eq=False)
class Hunt:
    """The search for the least number of servers of a candidate, and its state. `fails` and `likely` are positions in
    `counts`: the largest that surely fails, and the least that holds by its means; `sure` is the least that surely
    holds. `out` states why it is no answer.
    """

    candidate: Candidate
    counts: Sequence[int]
    over: Servers
    prober: Prober
    looks: int
    start: int = 0
    guess: int = 0
    low: int = -1  # the largest position that fails by its means, or by the data sheet
    fails: int = -1
    likely: int | None = None
    sure: int | None = None
    out: str = ""
    probes: dict[int, Probe] = field(default_factory=dict)

    def steps(self) -> Steps:
        """Yield a position, and the look or None for pilots, of each probe that the search needs."""
        self.low = self.fails = self.start - 1
        at, stride, last = max(self.start, self.guess), 1, len(self.counts) - 1
        while self.likely is None or self.likely - self.low > 1:
            probe = self.probes[at] = yield at, None
            if probe.holds if probe.likely is None else probe.likely:
                self.likely = at
            elif at == last:
                self.low, self.out = at, f"no number up to {self.counts[-1]} holds"
                return
            else:
                self.low = at
            at = min(at + stride, last) if self.likely is None else (self.low + self.likely) // 2
            stride *= 2
        yield from self._decided(range(self.likely, min(self.likely + LOOKED // 2, last + 1)), until=True)
        yield from self._decided(
            range(self.likely - 1, max(self.fails, self.likely - 1 - LOOKED // 2), -1), until=False
        )

    def _decided(self, positions: Sequence[int], *, until: bool) -> Steps:
        """Decide one position after the other, until one surely holds, or surely fails."""
        for at in positions:
            probe = None
            for look in range(self.looks):
                probe = self.probes[at] = yield at, look
                if probe.holds is not None:
                    break
            assert probe is not None
            if probe.holds:
                self.sure = at
            elif probe.holds is False:
                self.fails = max(self.fails, at)
            if probe.holds is until:
                return

    @property
    def at(self) -> int | None:
        """The position of the answer: the number that surely holds, or else the one that likely does."""
        if self.out or self.likely is None:
            return None
        return min(max(self.likely, self.fails + 1), len(self.counts) - 1) if self.sure is None else self.sure

    @property
    def count(self) -> int:
        """The number of servers of the answer, or the least that it may be."""
        return self.counts[min(self.low + 1, len(self.counts) - 1) if self.at is None else self.at]

    @property
    def span(self) -> tuple[int, int | None]:
        """The interval of the least number that keeps the conditions; its upper end is None if none surely does."""
        return self.counts[self.fails + 1], None if self.sure is None else self.counts[self.sure]

    @property
    def usd_hour(self) -> float:
        return self.candidate.usd_hour(self.count)

    @property
    def floor(self) -> float:
        """The price of the least number that may be the answer."""
        positions = (self.low + 1, len(self.counts) - 1, *([] if self.at is None else [self.at]))
        return self.candidate.usd_hour(self.counts[min(positions)])

    @property
    def binds(self) -> str:
        """What keeps one server fewer from doing: the metric and its cause, or the rate by the data sheet."""
        if self.at is None or self.at == 0:
            return "-"
        below = self.probes.get(self.at - 1)
        if below is None:
            return "rate (data sheet)"
        labels = [check.spelled.partition(".")[0].upper() for check in below.broken]
        cause = limit(below).word
        word = ", ".join(dict.fromkeys(labels)) or ("memory" if cause in ("KV", "refused") else "margin")
        return f"{word} ({cause})"

    @cached_property
    def scenario(self) -> Scenario:
        return self.over.scenario(self.count, 0)

    @cached_property
    def runs(self) -> Sequence[Run]:
        """The runs of the answer."""
        return self.prober.known(self.count) if self.at is not None else ()

    def interval(self, name: str, confidence: float) -> Interval | None:
        """Return the mean of a metric over the answer's runs, with its own interval; None if runs lack it."""
        values = [lookup(run.summary, name) for run in self.runs]
        known = [value for value in values if value is not None]
        return intervals.shown_interval(known, confidence) if known else None

    @property
    def joules(self) -> float | None:
        """An estimate of the energy of an output token: the stated power of boards while their GPUs are active."""
        fleet, used = self.scenario.fleet, list[float]()
        labels = fleet.labels if fleet else [""]
        powers = {name: each.hardware.power_w for name, (_, each) in zip(labels, self.scenario.pools, strict=True)}
        for run in self.runs:
            tokens, span_s = run.summary["output_tokens"], run.summary["makespan_s"]
            servers = run.summary.get("per_server") or [{**run.summary, "pool": "", "gpus": self.scenario.all_gpus}]
            drawn = [(powers[each["pool"]], each["gpus"] * each["gpu_active"]) for each in servers]
            if tokens and None not in powers.values():
                used.append(sum((power or 0.0) * active for power, active in drawn) * span_s / tokens)
        return fmean(used) if used else None


def wish(model: str, load: str | Path | Mapping[str, Any], changes: Changes = (), most_gpus: int = 64) -> Wish:
    """Return what is to be served. `load` is a scenario, by name or file, or a file of the fields of its workload, or
    these; the model and servers of a scenario do not count. Raises ScenarioError.
    """
    folder = Path()
    if isinstance(load, Mapping):
        fields = dict(load)
    elif Path(load).suffix == ".csv":
        fields = {"kind": "csv", "path": str(load)}
    else:
        path = catalog.scenario(load)
        fields, folder = documents.read(path).data, path.parent
    fields = fields if "workload" in fields else {"workload": fields}
    about = {"name": "recommended", "question": f"Which servers of {model} keep the conditions at the least price?"}
    loop = fields.get("loop", {})
    loop = loop if loop.get("mode", "both") != "both" else {**loop, "mode": "async"}
    fields = {**fields, **about, "model": model, "loop": loop}
    return Wish(fields, folder, changes, most_gpus)


def cards(names: Sequence[str], prices: Mapping[str, float]) -> list[tuple[str, Hardware]]:
    """Return GPUs by name; it may leave out what follows a dash if that is the only such one. Raises ScenarioError."""
    if unknown := [name for name in prices if name not in names]:
        raise ScenarioError(f"--price {unknown[0]}: expected one of the cards {', '.join(names)}", field="price")
    known, answer = catalog.names("hardware"), []
    for name in dict.fromkeys(names):
        longer = [each for each in known if each.startswith(f"{name}-")]
        card = shapes.hardware(longer[0] if len(longer) == 1 and name not in known else name)
        if name in prices:
            card = card.model_copy(update={"price_usd_hour": prices[name]})
        if not card.price_usd_hour:
            bound = f"needs --price {name}=USD, above 0, for an hour of a GPU"
            raise ScenarioError(f"--cards {name}: {card.name} has no price, {bound}", field="price", bound=bound)
        answer.append((Path(name).stem, card))
    if not answer:
        raise ScenarioError("--cards: got none, expected names such as h100,l40s", field="cards")
    return answer


def candidates(
    wish: Wish, of: Sequence[tuple[str, Hardware]], tensor: Sequence[int], knobs: Mapping[str, Sequence[Any]]
) -> Iterator[Candidate]:
    scheduler = wish.fields.get("scheduler", {"name": "vllm"})
    if not knobs and scheduler.get("name") == "vllm" and wish.fields.get("cost", {}).get("kind", "roofline") in SHEET:
        knobs = BATCHES
    mixture = shapes.model(str(wish.fields["model"]), wish.folder).experts > 0
    settings = [dict(zip(knobs, values, strict=True)) for values in product(*knobs.values())]
    for (name, card), shared, values in product(of, tensor, settings):
        if shared <= wish.most_gpus:
            yield Candidate(Server(name, card, shared, values))
            if mixture and 2 * shared <= wish.most_gpus:
                yield Candidate(Server(name, card, shared, values), ranks=True)


def least(scenario: Scenario, server: Server, terms: Terms) -> int:
    """Return the least number of servers by the data sheet: operations of the load's tokens over its span. Raises
    ScenarioError if reading the weights alone takes longer than a condition on TPOT allows.
    """
    if scenario.cost.kind not in SHEET:
        return 1
    model, card = scenario.model, server.card
    unread = 1 - model.experts_per_token / model.experts if model.experts else 0.0
    table = 0 if model.tied_embeddings else model.vocab * model.hidden * model.dtype_bytes
    read_bytes = model.weight_bytes - unread * model.expert_bytes - table
    read_s = read_bytes / (card.memory_bandwidth_bytes_s * server.tensor)
    for check in terms.conditions:
        if check.metric.startswith("tpot_s.") and check.compare[0] == "<" and read_s > check.bound:
            raise ScenarioError(f"{check.rule}: reading the weights alone takes {check.shown(read_s)} a token")
    requests = [] if terms.still else list(generators.build(scenario).open)  # a list of requests has no rate
    if len(requests) < 2:
        return 1
    span_s = (requests[-1].arrival_ns - requests[0].arrival_ns) / 1e9
    fresh = sum(each.output_tokens + (0 if each.prefix or each.sample_of else each.prompt_tokens) for each in requests)
    weights = model.layer_parameters - unread * model.expert_parameters
    work_s = 2 * weights * fresh / (card.flops.of_layers(model) * server.tensor)
    return max(1, math.ceil(work_s / span_s)) if span_s else 1


def prepared(wish: Wish, of: Sequence[Candidate], terms: Terms, runs: Runs) -> list[Hunt]:
    """Return the searches of candidates; `out` is why one cannot be built, or cannot do by the data sheet."""
    hunts = []
    for candidate in of:
        over, counts, bound, out = Servers(candidate, wish), candidate.counts(wish.most_gpus), 1, ""
        try:
            built = over.scenario(counts[0], 0)
            if candidate.beside is None and not candidate.ranks:
                bound = least(built, candidate.server, terms)
            if bound > len(counts):
                raise ScenarioError(f"the rate needs {bound} servers by the data sheet, {len(counts)} may be")
            counts = _buildable(over, counts) if candidate.ranks else counts
        except ScenarioError as error:
            out, bound = str(error).splitlines()[0], 1
        prober, guess = Prober(over, terms, runs), max(bound, candidate.first) - 1
        hunts.append(Hunt(candidate, counts, over, prober, len(terms.looks), bound - 1, guess, out=out))
    return hunts


def _buildable(over: Servers, counts: Sequence[int]) -> Sequence[int]:
    """Return the numbers of ranks until one that the model or the link does not allow."""
    for at, count in enumerate(counts):
        try:
            over.scenario(count, 0)
        except ScenarioError:
            return counts[:at]
    return counts


def hunt(hunts: Sequence[Hunt], runs: Runs, terms: Terms, cheapest: float = math.inf) -> None:
    """Search all numbers at once, probe by probe, so that the runs of one round may be made beside each other. Those
    that cost DEARER times the cheapest that holds, by means, or more than the cheapest of their card, get no more.
    """
    live = [(each, steps, next(steps)) for each in hunts if not each.out for steps in [each.steps()]]
    while live:
        needed = list[Scenario]()
        for each, _, (at, look) in live:
            count = terms.looks[look] if look is not None else 1 if terms.still else PILOTS
            needed += [each.over.scenario(each.counts[at], seed) for seed in range(count)]
        runs.ahead(needed, terms.warmup)
        probed = [(each, steps, _probed(each, steps, at, look)) for each, steps, (at, look) in live]
        _leave([each for each, _, following in probed if following], hunts, cheapest)
        live = [(each, steps, following) for each, steps, following in probed if following and not each.out]


def _leave(live: Sequence[Hunt], hunts: Sequence[Hunt], cheapest: float) -> None:
    """Leave the searches that cannot be cheap any more."""
    priced = [(each.candidate.kinds, each.usd_hour) for each in hunts if each.at is not None]
    cheapest = min([cheapest, *(price for _, price in priced)])
    for each in live:
        alike = [price for kinds, price in priced if kinds == each.candidate.kinds]
        if each.floor > min(DEARER * cheapest, *alike, math.inf) * (1 + intervals.NOTHING):
            each.out = f"dearer: $ {each.floor:,.2f} an hour or more"


def _probed(hunt: Hunt, steps: Steps, at: int, look: int | None) -> tuple[int, int | None] | None:
    """Send a probe to a search, and return what it needs next; None if it has ended."""
    prober, value = hunt.prober, hunt.counts[at]
    try:
        return steps.send(prober.pilot(value) if look is None else prober.look(value, look))
    except StopIteration:
        return None
    except RunError as error:
        hunt.out = f"its runs fail: {error}"
        return None


def mixes(hunts: Sequence[Hunt], most_gpus: int, unit: float) -> list[Candidate]:
    """Return candidates of two cards, of the cheapest kind of each: those that would be cheapest if capacities were in
    proportion.
    """
    best: dict[str, Hunt] = {}
    for each in sorted(hunts, key=lambda each: round(each.usd_hour / unit, 9)):
        if not each.candidate.ranks:
            best.setdefault(each.candidate.server.name, each)
    chosen = list[Candidate]()
    for one, other in combinations(best.values(), 2):
        made = []
        for beside in range(1, one.count):
            count = math.ceil(other.count * (1 - beside / one.count) - 1e-9)
            candidate = Candidate(other.candidate.server, (beside, one.candidate.server), first=count)
            if candidate.gpus(count) <= most_gpus:
                made.append(candidate)
        chosen += sorted(made, key=lambda each: round(each.usd_hour(each.first) / unit, 9))[:MIXES]
    return chosen


def search(wish: Wish, of: Sequence[Candidate], terms: Terms, runs: Runs) -> list[Hunt]:
    """Return the searches of all candidates, ranked. Raises a ScenarioError with the nearest thing if nothing keeps the
    conditions; CheckError.
    """
    hunts = prepared(wish, of, terms, runs)
    hunt(hunts, runs, terms)
    answers = [each for each in hunts if each.at is not None]
    if not answers:
        raise _nothing(hunts, wish)
    unit = min(each.server.card.price_usd_hour or 1.0 for each in of)
    mixed = prepared(wish, mixes(answers, wish.most_gpus, unit), terms, runs)
    hunt(mixed, runs, terms, min(each.usd_hour for each in answers))

    def rank(each: Hunt) -> tuple[int, float, float]:
        cannot = not each.probes or each.low + 1 >= len(each.counts)
        group = 2 + cannot if each.at is None else int(each.sure is None)
        metric, check = each.interval(terms.conditions[0].metric, 0.95), terms.conditions[0]
        mean = metric.mean if metric else 0.0
        return group, round(each.usd_hour / unit, 9), mean if check.compare[0] == "<" else -mean

    return sorted([*hunts, *mixed], key=rank)


def terms(wish: Wish, of: Sequence[Candidate], slo: Sequence[str], **precision: Any) -> Terms:
    """Return the terms of a search. Raises a ScenarioError with the nearest thing that would do if no candidate can be
    built, as if no card can hold the model; CheckError.
    """
    first = next(filter(None, (_try(Servers(each, wish)) for each in of)), None)
    if first is None:
        raise _unbuildable(wish, of)
    names = {each.server.name for each in of}
    parts = (len(of) + MIXES * math.comb(len(names), 2)) * LOOKED
    return terms_of(first, slo, None, **precision, parts=parts, still=generators.still(first))


def _try(over: Servers) -> Scenario | None:
    try:
        return over.scenario(1, 0)
    except ScenarioError:
        return None


def _unbuildable(wish: Wish, of: Sequence[Candidate]) -> ScenarioError:
    """Return why no candidate can be built: its mistake, or that no card holds the model, with one that would."""
    error = ScenarioError("no candidate")
    for each in of:
        try:
            Servers(each, wish).scenario(1, 0)
        except ScenarioError as wrong:
            error = wrong
    if "too little for a cache" not in str(error):
        return error
    sizes = [(shapes.hardware(name), name, tensor) for name in catalog.names("hardware") for tensor in TENSOR]
    sizes.sort(key=lambda size: (size[0].memory_bytes * size[2], size[2]))
    for card, name, tensor in sizes:
        if tensor <= wish.most_gpus and _try(Servers(Candidate(Server(name, card, tensor, {})), wish)):
            nearest = f"the least that would: {tensor} x {name}"
            break
    else:
        nearest = "nor does any other, 8 together: a narrower model.weights_dtype may fit"
    names = dict.fromkeys(each.server.name for each in of)
    most = max(each.server.tensor for each in of)
    text = f"--cards {','.join(names)}: none holds {wish.fields['model']}, {most} together; {nearest}"
    return ScenarioError(text, field="cards", bound=nearest)


def _nothing(hunts: Sequence[Hunt], wish: Wish) -> ScenarioError:
    """Return that no candidate keeps the conditions, with the one that comes nearest."""
    probes = [(each, at, probe) for each in hunts for at, probe in each.probes.items()]
    text = f"--slo: nothing of up to {wish.most_gpus} GPUs keeps the conditions"
    if not probes:
        return ScenarioError(f"{text}: {hunts[0].candidate.label(1)}: {hunts[0].out}", field="slo")
    each, at, probe = min(probes, key=lambda entry: entry[2].excess)
    cells = zip(probe.conditions, probe.intervals, strict=False)
    values = [f"{check.spelled} of {check.shown(value.mean)}" for check, value in cells]
    nearest = f"nearest is {each.candidate.label(each.counts[at])} with {', '.join(values) or probe.reason}"
    return ScenarioError(f"{text}; {nearest}", field="slo", bound=nearest)
