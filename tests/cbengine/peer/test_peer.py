"""The peer: transformers' own loop, watched. Its tokens are right, its table is true, and its end is never a hang."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
import peer_runs
from peer_runs import LOOPS, alone, checked, fifo, prompt, scenario, served, server, statuses, table, tiny

from cbengine.errors import UsageError
from cbengine.peer import peer_device
from cbengine.peer.peer_device import CudaClock
from cbengine.peer.transformers_server import PeerError, TransformersServer
from cbsim.policy.request import RequestSpec
from cbsim.results.metrics import token_times
from cbsim.results.record import STEP_COUNTS, Record
from cbsim.scenario import catalog
from cbsim.server import run_command
from cbsim.server.run_command import RunOptions
from cbsim.server.running import ServerError
from cbsim.workload import generators
from cbsim.workload.generators import Workload

COUNTED = [name for name in STEP_COUNTS if name not in ("plan_hash", "padded_tokens", "cached_blocks")]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# -- what comes out ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", LOOPS)
def test_requests_over_time_say_what_they_would_say_alone(loop: str) -> None:
    """Arrivals on the real clock: whoever shares a batch, the tokens are those of `generate`, as many as declared."""
    one, steps = served(scenario({"arrivals": {"kind": "poisson", "rate_per_s": 200}}), loop)
    assert len(one.outputs) == 12
    for spec, tokens in one.outputs.items():
        assert tokens == alone(spec)
    rows = one.record.requests()
    assert statuses(rows) == ["length"] * 12
    assert all(row.queued_ns >= row.arrival_ns for row in rows)
    requests = token_times(rows, steps)
    assert requests.generated.tolist() == [row.output_tokens for row in rows]
    assert (requests.scheduled_ns >= requests.queued_ns).all()
    assert one.record.polls >= len(steps)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    ("case", "load", "more"),
    [
        ("roomy", {}, {}),
        ("chunked", {"prompt_tokens": 100, "requests": 4}, {}),
        ("shared", {"shared_prefix_tokens": 24, "prompt_tokens": {"uniform": {"low": 20, "high": 40}}}, {}),
        ("prefill first", {"prompt_tokens": 30}, {"scheduler": fifo(name="transformers_prefill_first")}),
        ("tight", {"output_tokens": 30, "requests": 6}, {"kv_cache": {"num_blocks": 14, "block_size": 8}}),
    ],
)
def test_the_library_plans_what_the_simulator_says(
    loop: str, case: str, load: dict[str, Any], more: dict[str, Any]
) -> None:
    """Two witnesses of one rule: for requests that are all there at once, every count of every step that is measured
    here is the one that our policy plans, soft resets in a cache that is too small included. There, our policy lists
    decoding rows one by one, because some may find no block; which is all that may differ.
    """
    asked = scenario(load, **more)
    one, steps = served(asked, loop)
    record = peer_runs.simulated(asked, loop)
    planned = table(record)
    for name in COUNTED if case != "tight" else sorted({*COUNTED} - {"decode_rows", "prefill_tokens"}):
        assert steps[name].tolist() == planned[name].tolist(), name
    measured = [row._replace(queued_ns=0, queued_poll=0) for row in one.record.requests()]
    assert measured == [row._replace(queued_ns=0, queued_poll=0) for row in record.requests()]
    assert (steps["preempted"].sum() > 0) == (case == "tight")
    assert steps["cached_tokens"].sum() > 0 or case != "shared"
    assert (steps["cached_blocks"] >= planned["cached_blocks"]).all(), "the library's count has blocks nobody asks for"
    for spec, tokens in one.outputs.items():
        assert tokens == alone(spec), "a request that lost its blocks says the same in the end"


@pytest.mark.parametrize("loop", LOOPS)
def test_a_run_directory_like_any_other(loop: str, tmp_path: Path) -> None:
    """The command layer writes tables, summary and figures of the peer as of every server."""
    options = RunOptions("peer", (), tmp_path, (0, 10), None, (), as_json=False, quiet=True)
    done = run_command.one_loop(scenario(), loop, options, server)
    facts = json.loads((done.path / "env.json").read_text())
    assert facts["engine"] == f"transformers {transformers.__version__}"
    page = (catalog.ROOT / "docs" / "run_directory.md").read_text()
    assert not [key for key in facts if f"`{key}`" not in page]
    assert facts["attention"] == "paged|sdpa"
    assert facts["continuous_batching"]["max_batch_tokens"] == 48
    assert facts["continuous_batching"]["use_async_batching"] == (loop == "async")
    assert [note for note in facts["notes"] if "nothing overlaps" in note] == facts["notes"]
    assert len(facts["notes"]) == (loop == "async")
    assert done.summary["complete"]
    assert done.summary["output_tokens"] == sum(row.output_tokens for row in generators.build(scenario()).open)
    assert done.summary["gpu_active"] > 0
    assert not (done.path / "INCOMPLETE").exists()


def test_users_wait_for_their_answer() -> None:
    """A closed loop: a request comes when the one before it has ended, and its text is told to whoever wants it."""
    asked = scenario({"arrivals": {"kind": "closed_loop", "users": 2, "think_s": 0.001}, "requests": 6})
    heard: dict[RequestSpec, list[int]] = {}
    one = server(asked, "async", said=heard.__setitem__)
    one.run()
    assert heard == one.outputs
    assert statuses(one.record.requests()) == ["length"] * 6
    assert checked(one.record, "async")["running"].max() == 2


def test_a_declared_stop_is_a_stop() -> None:
    """Declared lengths short of the limit end with status `stop`, as everywhere."""
    one, _ = served(scenario({"max_tokens": 20, "stop_early": True, "output_tokens": 5, "requests": 2}), "sync")
    assert statuses(one.record.requests()) == ["stop", "stop"]


# -- what was asked for -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        {"name": "vllm", "max_num_seqs": 3, "max_num_batched_tokens": 48, "max_model_len": 100},
        {"name": "static", "batch_size": 3},
    ],
)
def test_another_scheduler_lends_its_sizes(other: dict[str, Any]) -> None:
    """A scenario of another scheduler runs with fifo and its sizes, and the facts say so."""
    one, steps = served(scenario(scheduler=other), "sync")
    resolved = one.facts["continuous_batching"]
    assert resolved["scheduler_type"] == "fifo"
    assert resolved["max_requests_per_batch"] == 3 == steps["rows"].max()
    assert resolved["num_blocks"] == one.record.total_blocks == 80
    assert resolved["max_batch_tokens"] == other.get("max_num_batched_tokens", 640)
    assert [other["name"] in note for note in one.facts["notes"]] == [True]


@pytest.mark.parametrize("loop", LOOPS)
def test_the_model_gets_its_attention_back(loop: str) -> None:
    served(scenario({"requests": 1}), loop)
    assert tiny().config._attn_implementation == "sdpa"
    kept = server(scenario({"requests": 1}), loop)
    assert tiny().config._attn_implementation == "paged|sdpa"
    kept.close()
    kept.close()
    assert tiny().config._attn_implementation == "sdpa"


def test_what_cannot_be_is_said_before_the_run() -> None:
    """The library's own refusals come as one error, and the model is left as it was."""
    asked, record = scenario(), Record(1 << 40)
    with pytest.raises(PeerError, match=r"cannot serve this scenario: Memory footprint \d+ is more than available"):
        TransformersServer(asked, "sync", generators.build(asked), tiny(), prompt, record, cuda_graphs=False)
    assert tiny().config._attn_implementation == "sdpa"
    assert issubclass(PeerError, UsageError)
    assert issubclass(PeerError, ServerError)


def test_rules_of_another_version_are_refused() -> None:
    """The library that runs is 5.17: a scenario of 5.23 would be compared with something else."""
    asked = scenario()
    newer = asked.model_copy(update={"scheduler": replace(asked.scheduler, version="5.23")})
    with pytest.raises(PeerError, match=r"scheduler\.version: got 5\.23, must be 5\.17"):
        TransformersServer(newer, "sync", generators.build(newer), tiny(), prompt, Record(100), cuda_graphs=False)


def test_asynchronous_batches_on_a_gpu_need_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(peer_device, "is_flash_attn_2_available", lambda: False)
    with pytest.raises(PeerError, match="put a flash_attn package on PYTHONPATH, or run with loop"):
        peer_device.attention(gpu, torch.bfloat16, "async")
    assert peer_device.attention(gpu, torch.bfloat16, "sync") == (peer_device.SDPA, [peer_device.NO_FLASH])
    monkeypatch.setattr(peer_device, "is_flash_attn_2_available", lambda: True)
    with pytest.raises(PeerError, match="the weights are float32"):
        peer_device.attention(gpu, torch.float32, "async")
    assert peer_device.attention(gpu, torch.bfloat16, "async") == (peer_device.FLASH, [])


# -- requests that do not end well ------------------------------------------------------------------------------------


def spec(index: int, prompt_tokens: int, output_tokens: int, arrival_ns: int = 0) -> RequestSpec:
    return RequestSpec(index, str(index), arrival_ns, prompt_tokens, output_tokens, output_tokens)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_client_gives_up(loop: str) -> None:
    """One while its request runs, one before it was ever planned; the others are not disturbed. Without block sharing,
    because with it the library may end the run when a cancelled request is in flight.
    """
    first, second, third = spec(0, 9, 500), spec(1, 5, 8), spec(2, 7, 8)
    load = Workload([first, second, third], 3, cancels=[(0, third), (40_000_000, first)])
    one, steps = served(scenario(scheduler=fifo(allow_block_sharing=False)), loop, load)
    rows = one.record.requests()
    assert statuses(rows) == ["aborted", "length", "aborted"]
    assert token_times(rows, steps).generated[2] == 0
    assert rows[2].first_step == -1
    assert one.outputs == {second: alone(second)}
    assert 0 <= steps["wasted_rows"].sum() <= (3 if loop == "async" else 0)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_request_too_long_for_the_cache_is_refused(loop: str) -> None:
    """The library would fail every request with it; what follows it comes all the same."""
    asked = scenario(
        {"arrivals": {"kind": "closed_loop", "users": 1}, "requests": 3, "prompt_tokens": 60, "output_tokens": 4},
        kv_cache={"num_blocks": 8, "block_size": 8},
    )
    one, steps = served(asked, loop)
    assert statuses(one.record.requests()) == ["refused"] * 3
    assert "the cache has 8" in one.record.requests()[0].reason
    assert not len(steps)
    fits = spec(0, 55, 1)  # 56 tokens in 8 blocks, the table of async mode included
    assert statuses(served(asked, loop, Workload([fits], 1))[0].record.requests()) == ["length"]


def test_nothing_to_do_ends_at_once() -> None:
    for loop in LOOPS:
        assert not len(served(scenario(), loop, Workload([], 0))[1])


# -- a run that ends early --------------------------------------------------------------------------------------------


class Failing:
    """A forward pass that fails after a number of steps."""

    def __init__(self, forward: Callable[..., Any], after: int) -> None:
        self._forward, self._left = forward, after

    def __call__(self, *given: Any, **named: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("the device is on fire")
        return self._forward(*given, **named)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_dying_loop_is_an_error_and_not_a_hang(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure in the forward pass ends the run with its message; the steps before it are kept, and agree."""
    one = server(scenario(), loop)
    monkeypatch.setattr(tiny(), "forward", Failing(tiny().forward, after=5), raising=False)
    with pytest.raises(PeerError, match="generation loop died: RuntimeError: the device is on fire"):
        one.run()
    assert len(checked(one.record, loop)) == (5 if loop == "sync" else 4)
    assert {"length", "unfinished"} >= {row.status for row in one.record.requests() if row.first_step >= 0}
    assert tiny().config._attn_implementation == "sdpa"


@pytest.mark.parametrize("loop", LOOPS)
def test_an_interrupt_is_heard_after_a_step(loop: str) -> None:
    """KeyboardInterrupt passes through the library's loop; what was measured until then is whole."""
    one = server(scenario(), loop)

    def stop(now_ns: int) -> None:
        assert now_ns == one.now_ns
        if one.record.step_count == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        one.run(stop)
    assert len(checked(one.record, loop)) == 7
    tokens = sum(sum(row.token_runs[1::2]) for row in one.record.requests())
    assert tokens == one.record.sampled_tokens > 0


def test_an_interrupt_is_heard_while_nothing_arrives() -> None:
    one = server(scenario(), "sync", Workload([spec(0, 3, 2, arrival_ns=3_600_000_000_000)], 1))

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        one.run(stop)
    assert not one.record.requests()


@pytest.mark.parametrize("loop", LOOPS)
def test_requests_that_are_never_planned_are_an_error(loop: str) -> None:
    """The library can keep its queue shut for ever; the end of the workload is then an error and not a wait."""
    one = server(scenario(), loop, Workload([spec(0, 3, 2), spec(1, 3, 2, arrival_ns=200_000_000)], 2))
    scheduler = one._manager.batch_processor.scheduler

    def shut(_: int) -> None:
        scheduler.block_new_requests = True

    with pytest.raises(PeerError, match="plans no step for the requests that are left"):
        one.run(shut)
    assert statuses(one.record.requests()) == ["length", "waiting"]


# -- the GPU's clock --------------------------------------------------------------------------------------------------


class Worlds:
    """A host whose time stands still but when it is told to pass, and how much faster the GPU's clock runs."""

    def __init__(self, rate: float) -> None:
        self.host_ns, self.rate = 0, rate

    def perf_counter_ns(self) -> int:
        return self.host_ns


class FakeEvent:
    """An event that happens when the stream gets to it; the test says when."""

    worlds: Worlds

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at_ns = self.worlds.host_ns

    def record(self, stream: Any) -> None:
        del stream

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: FakeEvent) -> float:
        return (other.at_ns - self.at_ns) * self.worlds.rate / 1e6


@given(
    drift=st.floats(-2e-4, 2e-4),
    steps=st.lists(st.tuples(st.integers(1_000, 100_000), st.integers(10_000, 9_000_000)), min_size=1, max_size=60),
)
@settings(max_examples=40)
def test_kernels_keep_their_order_on_a_clock_that_drifts(drift: float, steps: list[tuple[int, int]]) -> None:
    """Whatever the GPU's clock does, a step begins after it was enqueued and after the step before, is over when its
    tokens are there, and lasts what it lasted, but for the drift.
    """
    worlds = FakeEvent.worlds = Worlds(1 + drift)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(peer_device, "time", worlds)
        patched.setattr(torch.cuda, "Event", FakeEvent)
        stream: Any = SimpleNamespace(synchronize=lambda: None)
        clock: Any = CudaClock(stream)
        last = 0
        for launching, computing in steps:
            before = clock.mark()
            enqueued = worlds.host_ns
            worlds.host_ns += launching
            before[0].at_ns = worlds.host_ns
            after = clock.mark()
            worlds.host_ns += computing
            after[0].at_ns = worlds.host_ns
            worlds.host_ns += 5_000
            start, end = clock.interval(before, after, worlds.host_ns)
            assert max(last, enqueued) <= start <= end <= worlds.host_ns
            assert abs((end - start) - computing) <= abs(drift) * (computing + launching) * 2 + 5_000 + launching
            last = end


# -- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("graphs", [False, True])
def test_on_a_gpu(loop: str, graphs: bool) -> None:
    """With flash attention in both loops, without it in the synchronous one; the table is as true as on a CPU."""
    flash = transformers.utils.is_flash_attn_2_available()
    if loop == "async" and not flash:
        pytest.skip("asynchronous batches need a flash_attn package")
    asked = scenario(scheduler=fifo(max_blocks_per_request=8), kv_cache={"num_blocks": 40, "block_size": 256})
    model = tiny("cuda", "bfloat16" if flash else "float32")
    record = Record(40)
    one = TransformersServer(asked, loop, generators.build(asked), model, prompt, record, cuda_graphs=graphs)
    one.run()
    steps = checked(record, loop)
    assert statuses(record.requests()) == ["length"] * 12
    assert {spec.output_tokens - len(tokens) for spec, tokens in one.outputs.items()} == {0}
    assert (steps.lane("compute") > 0).all()
    assert (one.facts["continuous_batching"]["use_cuda_graph"] == (True, True)) == (graphs and flash)
