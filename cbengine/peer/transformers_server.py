"""Hugging Face transformers' own continuous batching, 5.17, on a scenario and weights of ours: the peer, side by side.

The library's generation loop runs as it is, in this thread, with its own scheduler, cache, batches, graphs and double
buffer; `peer_steps` watches it. Requests go in before a batch is planned, when they are due on the real clock. Greedy;
a request ends with its declared last token.

What the library does wrong is kept: with block sharing, for example, a cancellation in async mode may end the run. Only
a request that can never fit its cache is refused here, because the library would fail all others with it.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
import transformers
from transformers import GenerationConfig
from transformers.generation.continuous_batching.requests import logger as library_log

from cbengine import tokens
from cbengine.peer import peer_device, standin
from cbengine.peer.peer_device import PeerError
from cbengine.peer.peer_steps import PeerRequest, Watch
from cbsim.policy.plan import Outcome, StepPlan
from cbsim.policy.request import Finish, Request, RequestSpec
from cbsim.policy.schedulers.transformers_settings import TransformersSettings
from cbsim.results.record import Record, StepTimes
from cbsim.scenario.scenario import Scenario, depth
from cbsim.server.inbox import Inbox
from cbsim.workload.generators import Workload

__all__ = ["PeerError", "TransformersServer"]

VERSION = "5.17"  # of the library whose inner calls this knows
NAP_NS = 20_000_000  # waiting for arrivals is cut into naps, so that an interrupt is heard
RESOLVED = (
    *("block_size", "num_blocks", "max_batch_tokens", "max_requests_per_batch", "max_blocks_per_request"),
    *("scheduler_type", "safety_margin", "allow_block_sharing", "use_async_batching", "use_cuda_graph"),
    *("q_padding_interval_size", "kv_padding_interval_size", "max_memory_percent", "cpu_offload_space"),
)


class TransformersServer:
    """A server for one run. `outputs` holds the tokens of every request that ended with its last one.

    `facts` says what the library made of its options, and in `notes` what else its figures depend on. `model` has its
    own attention back when the run is over.
    """

    measured = True

    def __init__(
        self,
        scenario: Scenario,
        loop: str,
        workload: Workload,
        model: Any,
        prompts: Callable[[RequestSpec], list[int]],
        record: Record,
        *,
        cuda_graphs: bool,
        stand_in: bool = False,
        said: Callable[[RequestSpec, list[int]], None] | None = None,
        saves_tokens: bool = False,
    ) -> None:
        """Allocates a cache of `record.total_blocks` blocks and warms up. `said` is told what a request generated when
        it ends. With `stand_in`, a GPU without a flash_attn package has the stand-in for it. Raises PeerError.
        """
        version = transformers.__version__
        if version.rpartition(".")[0] != VERSION:
            raise PeerError(f"needs transformers {VERSION}, {version} is installed")
        rules = scenario.scheduler
        if isinstance(rules, TransformersSettings) and rules.version != VERSION:
            raise PeerError(f"scheduler.version: got {rules.version}, must be {VERSION}: the library's that is run")
        self.record = record
        self.outputs: dict[RequestSpec, list[int]] = {}
        self._depth, self._model, self._prompts, self._said = depth(loop), model, prompts, said
        self._saves = saves_tokens
        self._inbox = Inbox(workload, record)
        self._ready = {spec: prompts(spec) for spec in workload.open}  # at hand when their requests arrive
        self._served: dict[str, PeerRequest] = {}
        self._tell: Callable[[int], None] = lambda _: None
        self._start_ns = self._now_ns = 0
        self._manager: Any = None
        self._watch: Watch | None = None
        self._attention = model.config._attn_implementation
        self._borrowed = ExitStack()
        try:
            if stand_in:
                self._borrowed.enter_context(standin.lent(model.device))
            with _quiet():
                self.facts = self._set_up(scenario, loop, workload, cuda_graphs)
            if stand_in and not standin.is_lent():
                self.facts["notes"].append(standin.NOT_NEEDED)
        except BaseException as error:
            self.close()
            if isinstance(error, PeerError) or not isinstance(error, MemoryError | RuntimeError | ValueError):
                raise
            hint = "; a smaller scheduler.max_batch_tokens may do" if "emory" in str(error) else ""
            raise PeerError(f"transformers cannot serve this scenario: {error}{hint}") from error

    def files(self) -> Mapping[str, bytes]:
        """Further files of the run directory."""
        if not self._saves:
            return {}
        said = ((spec, self._prompts(spec), outputs) for spec, outputs in self.outputs.items())
        return {tokens.FILE: tokens.table(said)}

    @property
    def now_ns(self) -> int:
        """How far the run has come."""
        return self._now_ns

    def run(self, on_step: Callable[[int], None] | None = None) -> None:
        """Serve to the end of the workload. `on_step` is told the time after every step and while waiting; if it raises
        KeyboardInterrupt, what was recorded until then is kept. Raises PeerError when the library's loop dies.
        """
        assert self._watch is not None, "a server is good for one run"
        self._tell = on_step or self._tell
        self._start_ns = self._watch.epoch_ns = time.perf_counter_ns()
        error: BaseException | None = None
        try:
            with _quiet():
                self._manager._run_generation_loop()
            error = self._manager.background_thread_status.fatal_error
        except Exception as failure:  # while the library was handling another one
            error = failure
        finally:
            self.close()
        if isinstance(error, PeerError):
            raise error
        if error is not None:
            raise PeerError(f"transformers' generation loop died: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Give back the cache, the graphs and the stand-in, and to the model its attention. May be called twice."""
        if self._watch:
            self._watch.close()
        self._manager = self._watch = None
        self._model.set_attn_implementation(self._attention)
        self._borrowed.close()
        gc.collect()
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()

    def _set_up(self, scenario: Scenario, loop: str, workload: Workload, cuda_graphs: bool) -> dict[str, Any]:
        """The library's manager and processor, warm and watched; returns the facts."""
        model, cuda, blocks = self._model, self._model.device.type == "cuda", self.record.total_blocks
        implementation, notes = peer_device.attention(model.device, model.dtype, loop)
        graphs = cuda_graphs and scenario.loop.cuda_graphs.enabled and implementation == peer_device.FLASH
        config, hints, adapted = peer_device.configuration(scenario, loop, blocks, workload, cuda=cuda, graphs=graphs)
        model.set_attn_implementation(implementation)
        self._manager = manager = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=config,
            workload_hints=hints,
        )
        with peer_device.host_memory(model.device):
            manager.batch_processor = manager._create_batch_processor()
        if loop == "async" and not cuda:
            peer_device.double_buffer(manager.batch_processor)
        peer_device.warm_up(manager)
        self._watch = Watch(
            manager.batch_processor,
            self._served,
            self.outputs,
            self._elapsed,
            poll=self._poll,
            launched=self._launched,
            applied=self._applied,
        )
        return {
            "engine": f"transformers {transformers.__version__}",
            "device": torch.cuda.get_device_name(model.device) if cuda else "cpu",
            "threads": torch.get_num_threads(),
            "attention": implementation + (", flash_attn by the stand-in" if standin.NOTE in notes else ""),
            "continuous_batching": {name: getattr(manager.continuous_batching_config, name) for name in RESOLVED},
            "notes": notes + adapted,
        }

    def _elapsed(self) -> int:
        self._now_ns = time.perf_counter_ns() - self._start_ns
        return self._now_ns

    # -- requests in --------------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        """Hand over what has come in. With nothing else to do, sleep until something comes, or end the loop."""
        assert self._watch is not None
        self.record.polls += 1
        inbox, manager, stalled = self._inbox, self._manager, self._watch.stalled
        quiet = stalled or not manager.batch_processor.has_pending_requests()
        while True:
            now = self._elapsed()
            taken = [spec for spec in inbox.arrived(now) if self._submitted(spec)]
            cancelled = inbox.given_up(now) if inbox.quits else []
            for spec in cancelled:
                self._served[str(spec.index)].finish = Finish.ABORTED
                manager.cancel_request(str(spec.index))
            if taken or cancelled or not quiet:
                return
            if not inbox and not (stalled and inbox.quits):
                break
            self._nap()
        if stalled:
            raise PeerError("transformers plans no step for the requests that are left")
        status = manager.background_thread_status
        status.request_stop(status.FLUSH_AND_STOP, global_rank=0)

    def _nap(self) -> None:
        left = min(self._inbox.due_ns - self._elapsed(), NAP_NS)
        if left > 0:
            time.sleep(left / 1e9)
        self._tell(self._elapsed())

    def _submitted(self, spec: RequestSpec) -> bool:
        """Hand a request over, unless it can never have its blocks, with those of a row run ahead of its end."""
        cache = self._manager.batch_processor.cache
        most = spec.prompt_tokens + spec.max_tokens - 2 + self._depth
        needed = (most + 1) // cache.block_size + 1  # the library asks for one more than the ceiling now and then
        if needed > cache.num_blocks:
            self.record.refused(spec, f"{most} tokens need {needed} blocks, the cache has {cache.num_blocks}")
            self._inbox.ended(spec, self._now_ns)
            return False
        name = str(spec.index)
        self._served[name] = PeerRequest(spec)
        prompt = self._ready.pop(spec) if spec in self._ready else self._prompts(spec)
        taken = self._manager.add_request(prompt, request_id=name, max_new_tokens=spec.output_tokens, eos_token_id=-1)
        assert taken == name, "the loop takes no more requests"
        return True

    # -- steps out ----------------------------------------------------------------------------------------------------

    def _launched(self, plan: StepPlan) -> None:
        for chunk in plan.work.chunks:
            if chunk.admitted:
                self.record.admitted(cast("Request", self._served[str(chunk.spec.index)]), plan.step)

    def _applied(self, plan: StepPlan, outcome: Outcome, times: StepTimes) -> None:
        self.record.applied(plan, outcome, times)
        for spec, _ in outcome.finished:
            if self._said:
                self._said(spec, self.outputs[spec])
            self._inbox.ended(spec, self._now_ns)
        self._tell(self._now_ns)


@contextmanager
def _quiet() -> Iterator[None]:
    """The library logs warnings about options, and as an error what is raised here."""
    level = library_log.level
    library_log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        library_log.setLevel(level)
