"""Small engines for tests: two layers, a clock that counts, random loads, and the text that transformers generates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from hypothesis import strategies as st

from cbengine import build
from cbengine.build import Setup
from cbengine.device.base import EngineDevice
from cbengine.driver import Engine
from cbengine.sequence import Sequence as Text
from cbsim.policy.groups import Sight
from cbsim.policy.plan import StepPlan
from cbsim.policy.request import RequestSpec
from cbsim.record import directory, optional_tables
from cbsim.record.record import STEP_COLUMNS, RequestRow
from cbsim.record.tables import RequestTable, Steps, requests_of
from cbsim.runs import assemble, reading, replan
from cbsim.scenario import scenario
from cbsim.scenario.scenario import Scenario, depth
from cbsim.schedulers.sglang.scheduler import SglangScheduler
from cbsim.workload.requests import Users, Workload
from support.engine.peer_model import to_transformers
from support.written import tables

torch.set_num_threads(1)
PAGED = (
    "vllm 0.33",
    "vllm 0.19",
    "transformers_fifo",
    "transformers_prefill_first",
    "transformers_fifo 5.23",
    "sglang",
)
PAUSING = "trtllm MAX_UTILIZATION"
GROWING = (PAUSING, "sarathi", "simple_chunking", "vllm_v0")  # blocks are taken as they are needed, and taken back
RESERVING = (
    "static",
    "contiguous",
    "dynamic_padded",
    "faster_transformer",
    "orca",
    "tgi",
    "trtllm",
)  # nobody is preempted: all is reserved
WITHOUT_CACHE = (*RESERVING, *GROWING)  # nothing is shared
SCHEDULERS = (*PAGED, *WITHOUT_CACHE)
WHOLE_PROMPTS = ("static", "dynamic_padded", "faster_transformer", "orca", "tgi", "vllm_v0")
LOOPS = ("sync", "async")
MS = 1_000_000
INLINE = Setup(device="inline")
VOCAB = 199
SHAPE = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate": 96, "vocab": VOCAB}
DRAFTERS = ("ngram", "own", "other")
"""Prompt lookup; the target as its own drafter, whose drafts all come true; another model, most of whose do not."""
PROMPTS, SHARED = (13, 1, 12, 8, 30), (12, 8, 4, 0)  # few lengths, so that references are computed once
CHUNKS = (7, 64, 4096)  # budgets: pieces of a prompt, some prompts, everything
MOST_OUTPUTS = 24  # of any request here: references are this long
MOST_STEPS = 10_000
NEAR = 1e-4  # two logits closer than this share of the larger may change places with the order of a sum
ties: list[tuple[int, ...]] = []
"""Prompts whose text differed from the reference at a near tie."""


class Ticks:
    """A clock that moves by as much whenever it is read: what arrives when does not depend on the machine."""

    def __init__(self, tick_ns: int = MS) -> None:
        self._at_ns, self._tick_ns = 0, tick_ns

    def now_ns(self) -> int:
        self._at_ns += self._tick_ns
        return self._at_ns

    def wait_until(self, at_ns: int) -> None:
        self._at_ns = max(self._at_ns, at_ns)

    work_until = wait_until


@contextmanager
def plain_cache() -> Iterator[None]:
    """Every scheduler serves models whose layers see less than all, and keeps the whole sequence for every layer."""
    kind = Scenario.kind

    def opened(one: Scenario) -> Any:
        return replace(kind.fget(one), serves=tuple(Sight))  # type: ignore[attr-defined]

    with mock.patch.object(Scenario, "kind", property(opened)):
        yield


class Run:
    """An engine that has served its workload, checked to have left nothing behind. `tick_ns` 0 is the real clock;
    `device` makes another device than `setup` asks for; `met` is called with the engine before it runs.
    """

    def __init__(
        self,
        asked: Scenario,
        loop: str,
        load: Workload,
        setup: Setup = INLINE,
        *,
        tick_ns: int = MS,
        device: Callable[..., EngineDevice] | None = None,
        met: Callable[[Engine], None] = lambda _: None,
    ) -> None:
        self.replaced = 0
        asked = build.adapted(asked, setup) if setup.device == "cuda" else asked
        self.scenario = asked.model_copy(update={"loop": asked.loop.model_copy(update={"mode": loop})})
        self.load = load
        clock = Ticks(tick_ns) if tick_ns else None
        with mock.patch.object(build, "device", device or build.device):
            self.engine, self.device = build.engine(self.scenario, loop, load, setup, clock=clock, on_plan=self._plan)
        met(self.engine)
        self.engine.run()
        self.engine.close()
        check_left_behind(self.engine)
        self.rows: dict[int, RequestRow] = {row.index: row for row in requests_of(self.engine.record)}

    def _plan(self, plan: StepPlan) -> None:
        assert plan.step < MOST_STEPS, "the run does not end"
        self.replaced += len(plan.changes.replaced)

    @property
    def steps(self) -> Steps:
        return steps(self.engine)

    def total(self, column: str) -> int:
        return int(self.steps[column].sum())

    @property
    def statuses(self) -> Counter[str]:
        return Counter(row.status for row in self.rows.values())

    @property
    def texts(self) -> dict[int, list[int]]:
        """What every request has said, by its index."""
        return {spec.index: text.outputs for spec, text in self.engine.sequences.items()}

    def written(self, folder: Path) -> Path:
        """The run directory of what was recorded."""
        writer = directory.RunWriter.new(folder, "run", "0" * 8)
        writer.scenario(scenario.dump(self.scenario))
        writer.json("env.json", {})
        tables(writer, self.engine.record)
        writer.json("summary.json", {"schema_version": directory.SCHEMA_VERSION})
        writer.complete()
        return writer.path


def steps(engine: Engine) -> Steps:
    return Steps(np.frombuffer(engine.record.steps, dtype=np.int64).reshape(-1, len(STEP_COLUMNS)))


def check_left_behind(engine: Engine) -> None:
    """After a run every cache block is free. A slot may be taken only by requests of whose end no plan has told:

    vLLM runs a last step to report ends, so none. The others do not: those that ended after their last plan. The rows
    of a static batch stay until the next one is formed, so all of the last batch.
    """
    engine.check_returned()
    taken = {spec: text.slot for spec, text in engine.sequences.items() if text.slot >= 0}
    assert len(set(taken.values())) == len(taken) == engine._batcher._scratch_slot - len(engine._batcher._free)
    name = type(engine.scheduler).__name__
    if name == "StaticScheduler":
        assert set(taken) == {text.spec for text in engine._batcher._decoding.sequences}
    else:
        assert set(taken) <= set(engine.scheduler.decoding.ended)
        assert not taken or name != "VllmScheduler"


# -- servers and loads ------------------------------------------------------------------------------------------------


def asked(scheduler: str, *overrides: str) -> Scenario:
    """The scenario `tiny_cpu` with a smaller model, one of SCHEDULERS, and `overrides`."""
    shape = [f"model.{field}={value}" for field, value in SHAPE.items()]
    return scenario.load("tiny_cpu", [*named(scheduler), *shape, *overrides])


def named(scheduler: str) -> list[str]:
    """The overrides that one of SCHEDULERS stands for: its name and, behind a space, its version or policy."""
    name, _, rules = scheduler.partition(" ")
    field = "capacity_scheduler_policy" if name == "trtllm" else "version"
    return [f"scheduler.name={name}", *([f"scheduler.{field}='{rules}'"] if rules else [])]


@cache
def _plain(scheduler: str) -> Scenario:
    return asked(scheduler)


def server(
    scheduler: str, block_size: int, num_blocks: int, budget: int, seats: int, *, sharing: bool, **more: Any
) -> Scenario:
    """The same limits under each scheduler's own names; `more` are options of the scheduler. Some know seats only."""
    limits: dict[str, Any] = {"batch_size": seats}
    if scheduler in ("faster_transformer", "orca", "vllm_v0"):
        limits = {"max_num_seqs": seats}
    elif scheduler.startswith("vllm"):
        limits = {"max_num_seqs": seats, "max_num_batched_tokens": max(budget, seats), "enable_prefix_caching": sharing}
    elif scheduler.startswith("transformers"):
        limits = {"max_requests_per_batch": seats, "max_batch_tokens": budget, "allow_block_sharing": sharing}
    elif scheduler == "sglang":
        chunk = max(block_size, budget // block_size * block_size)
        limits = {"max_running_requests": seats, "chunked_prefill_size": chunk, "disable_radix_cache": not sharing}
        limits["schedule_conservativeness"] = 0.02  # it lets in more than fits, and has to retract
    elif scheduler == "contiguous":
        limits = {"max_num_seqs": seats, "max_num_batched_tokens": max(budget, seats)}
    elif scheduler == "tgi":  # whose prompts are not cut
        limits = {"max_batch_size": seats, "max_batch_prefill_tokens": max(budget, 64)}
    elif scheduler in ("sarathi", "simple_chunking"):
        limits = {"max_num_seqs": seats, "chunk_size": budget}
    elif scheduler.startswith("trtllm"):
        limits = {"max_batch_size": seats, "max_num_tokens": max(budget, seats)}
        limits |= {"enable_chunked_prefill": True, "chunk_unit_size": min(3, budget)}
    plain = _plain(scheduler)
    rules = replace(plain.scheduler, **(limits | more))
    cache = plain.kv_cache.model_copy(update={"block_size": block_size, "num_blocks": num_blocks})
    return plain.model_copy(update={"scheduler": rules, "kv_cache": cache})


def speculating(sizes: Scenario, by: str, k: int = 3, **more: object) -> Scenario:
    """A server that speculates; the acceptance that its scenario states is not the engine's."""
    fields: dict[str, Any] = {"method": "ngram", "k": k, "acceptance": {"rate": 0.5}}
    if by != "ngram":
        layers = SHAPE["layers"] - (by == "other")
        model = sizes.model.model_dump(mode="json") | {"layers": layers, "dtype": "float32"}
        fields |= {"method": "draft_model", "drafter": {"model": model}}
    return Scenario.model_validate(sizes.model_dump(mode="json") | {"speculation": fields | more})


def with_load(sizes: Scenario, **load: Any) -> Scenario:
    """A server with the workload of these fields."""
    return Scenario.model_validate(sizes.model_dump(mode="json") | {"workload": load})


def spec(index: int, prompt: int, outputs: int, **fields: Any) -> RequestSpec:
    """A request that arrives at 0 and ends at its limit, unless `fields` say otherwise."""
    given = {"arrival_ns": 0, "max_tokens": outputs, **fields}
    return RequestSpec(index=index, id=f"r{index}", prompt_tokens=prompt, output_tokens=outputs, **given)


def shared(family: int, tokens: int, width: int = 4) -> dict[str, Any]:
    """Fields of a request whose first tokens are those of its family."""
    ids = tuple(1000 * family + i for i in range(-(-tokens // width)))
    return {"prefix": ids, "prefix_block_tokens": width, "prefix_tokens": tokens}


def closed(specs: Sequence[RequestSpec], users: int, think_ns: int = 0) -> Workload:
    """A closed loop: the end of a request, whatever the reason, brings the next one of the list."""
    return Workload(list(specs[:users]), len(specs), follow=Users(specs[users:], think_ns))


def least_blocks(scheduler: str, block_size: int, specs: Sequence[RequestSpec]) -> int:
    """The smallest cache that refuses none of them."""
    longest = max(one.prompt_tokens + one.max_tokens for one in specs)
    if scheduler.startswith("transformers"):
        return max(2, longest // block_size + 1)
    if scheduler == "sglang":
        return -(-(longest + 8) // block_size) + 2  # what is longer is refused, or cut off
    return max(2, -(-longest // block_size) + (scheduler.partition(" ")[0] == "vllm"))


class Case(NamedTuple):
    """A server and its load. Good for one run."""

    scenario: Scenario
    load: Workload

    def run(self, loop: str, setup: Setup = INLINE, **more: Any) -> Run:
        return Run(self.scenario, loop, self.load, setup, **more)


@st.composite
def requests(draw: st.DrawFn) -> list[RequestSpec]:
    """A few requests of two families: some begin alike, some end before their limit, which nobody foresees."""
    specs = []
    for index in range(draw(st.integers(3, 7))):
        prompt, outputs = draw(st.sampled_from(PROMPTS)), draw(st.integers(1, 20))
        alike = min(draw(st.sampled_from(SHARED)), prompt)
        fields = shared(draw(st.sampled_from((0, 0, 1))), alike) if alike else {}
        most, priority = outputs + draw(st.sampled_from((0, 0, 1, 4))), draw(st.integers(0, 2))
        arrival = draw(st.sampled_from((0, 0, 0, 8, 25, 60))) * MS + index  # no two are as old: see `odd_cases`
        specs.append(spec(index, prompt, outputs, max_tokens=most, arrival_ns=arrival, priority=priority, **fields))
    return specs


@st.composite
def cases(draw: st.DrawFn, scheduler: str, **more: Any) -> Case:
    """Caches are mostly too small for all requests at once. Some clients give up; some send one after the other."""
    specs = draw(requests())
    block_size = draw(st.integers(4 if scheduler.startswith("transformers") else 1, 16))
    least = least_blocks(scheduler, block_size, specs)
    blocks = least + draw(st.sampled_from((0, 1, 3, least, 20 * least)))
    if scheduler in ("faster_transformer", "orca"):
        more = {"max_model_len": least * block_size, **more}  # else there is room for one at a time
    budget, seats, sharing = draw(st.sampled_from(CHUNKS)), draw(st.integers(1, 7)), draw(st.sampled_from((1, 1, 0)))
    sizes = server(scheduler, block_size, blocks, budget, seats, sharing=bool(sharing), **more)
    if draw(st.sampled_from((False, False, True))):
        at_once = [replace(one, arrival_ns=one.index) for one in specs]
        return Case(sizes, closed(at_once, draw(st.integers(1, 4)), 3 * MS))
    gone = draw(st.lists(st.sampled_from(specs), unique=True, min_size=1, max_size=2))
    cancels = [(one.arrival_ns + draw(st.integers(0, 80)) * MS, one) for one in gone]
    return Case(sizes, Workload(specs, len(specs), sorted(cancels, key=lambda cancel: (cancel[0], cancel[1].index))))


# -- the reference ----------------------------------------------------------------------------------------------------


@cache
def transformers_model(dtype: torch.dtype = torch.float32) -> Any:
    """transformers' own model in float32, with the weights that every engine here draws, rounded to `dtype`."""
    plan = build.executor_plan(asked("vllm"), "sync", [], INLINE)
    tensors = {name: tensor.to(dtype).float() for name, tensor in plan.tensors().items()}
    return to_transformers(plan.architecture, tensors).eval()


def drawn_weights(folder: Path) -> Path:
    """The weights that every engine on a CPU draws, in this folder: on a GPU a seed means others."""
    transformers_model().save_pretrained(folder)
    return folder


@cache
def generated(prompt: tuple[int, ...]) -> list[int]:
    """What transformers' `generate` says after a prompt, alone, greedily: MOST_OUTPUTS tokens."""
    return continuation(transformers_model(), list(prompt), MOST_OUTPUTS)


def continuation(model: Any, prompt: list[int], count: int) -> list[int]:
    """The tokens with which a model of transformers goes on after a prompt, greedily."""
    ids = torch.tensor([prompt])
    lengths = {"max_new_tokens": count, "min_new_tokens": count}
    answer = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **lengths)
    return list(answer[0, len(prompt) :].tolist())


def check_text(text: Text) -> None:
    """The outputs begin as `generate` goes on. They may differ where the two likeliest tokens are nearly as likely:
    the order of sums depends on what else is in a batch, and so do the last bits of a logit. After that the texts have
    nothing to do with each other. One such place in a whole run of the tests is chance, more would be a defect.
    """
    prompt = tuple(text.prompt.tolist())
    wanted = generated(prompt)[: len(text.outputs)]
    if text.outputs == wanted:
        return
    at = next(i for i, (a, b) in enumerate(zip(text.outputs, wanted, strict=True)) if a != b)
    with torch.inference_mode():
        logits = transformers_model()(torch.tensor([[*prompt, *wanted[:at]]])).logits[0, -1]
    first, second = logits.topk(2).values.tolist()
    assert logits[text.outputs[at]] == second, (text.spec.id, at, text.outputs, wanted)
    assert first - second < NEAR * abs(first), (text.spec.id, at, text.outputs, wanted)
    if prompt not in ties:
        ties.append(prompt)
    assert len(ties) <= 1, ties


def check_texts(run: Run, check: Callable[[Text], None] = check_text) -> None:
    """Who was not cancelled or refused has all its tokens, and everybody's are right."""
    longest = getattr(run.engine.scheduler.options, "max_model_len", 1 << 30)
    gone = {one.index for _, one in run.load.cancels}
    most = 1 + (run.scenario.speculation.k if run.scenario.speculation else 0)  # tokens of a row
    assert len(run.rows) == run.load.total
    for one, text in run.engine.sequences.items():
        row = run.rows[one.index]
        delivered = sum(row.token_runs[1::2])
        if row.status in ("length", "stop"):
            assert len(text.outputs) == delivered == min(one.output_tokens, longest - one.prompt_tokens), one
        else:
            assert row.status == "aborted", row
            assert row.index in gone
            least = -isinstance(run.engine.scheduler, SglangScheduler)  # it counts one more, which reaches nobody
            assert least <= len(text.outputs) - delivered <= most, one
        check(text)


def check_derived(run: Run, loop: str) -> None:
    """What `cbsim derive` does: the recorded polls lead to the recorded plans, without a device or a clock."""
    files = optional_tables.files_of(run.engine.record)
    recorded = reading.Run(Path(), "", {}, {}, run.steps, RequestTable.of(list(run.rows.values())), None, files)
    specs = {one.index: one for one in run.engine.sequences}
    drafts = replan._drafts(recorded) if run.scenario.speculation else None
    policy = assemble.scheduler(run.scenario, loop)
    verdict = replan._compare(recorded, policy, depth(loop), specs.get, drafts=drafts)
    assert verdict == (len(run.steps), len(run.steps), None)
