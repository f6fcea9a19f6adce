"""Requests of recorded scheduler tests of vLLM and transformers: contents as chained ids, aborts, stop tokens.

They are workloads like any other (`kind: golden`), and conformance replays them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from cbsim.errors import ScenarioError
from cbsim.files import parsed_json
from cbsim.policy.request import RequestSpec
from cbsim.scenario.documents import Document
from cbsim.scenario.fields import Form, complaint, shown
from cbsim.scenario.rows import document, open_text
from cbsim.workload.requests import Workload

Line = dict[str, Any]
STOP_TOKEN = 2


def golden(path: Path, step_s: float, limit: int | None = None) -> Workload:
    """Read the requests of a vLLM test (times in microseconds) or a transformers one (in loop passes of `step_s`).

    Prompt and output contents become chained content ids, so prefixes are shared exactly where they were.
    """
    with open_text(path) as file:
        workload = parsed_json(document(path, file), path)
    layout = next((key for key in ("config", "cb") if isinstance(workload, dict) and key in workload), None)
    if layout is None or not workload.get("requests"):
        raise ScenarioError(f"{path}: expected `requests`, and `config` (vLLM) or `cb` (transformers)")
    Document(str(path), None, workload).checked(Vllm if layout == "config" else Transformers)
    try:
        specs, cancels = _vllm(workload) if layout == "config" else _transformers(workload, round(step_s * 1e9))
    except ValueError as error:
        raise ScenarioError(f"{path}: cannot be used: {error}") from None
    chosen = set(specs[:limit])
    cancels = sorted((c for c in cancels if c[1] in chosen), key=lambda c: (c[0], c[1].index))
    return Workload(specs[:limit], len(chosen), cancels=cancels)


Recorded = tuple[list[RequestSpec], list[tuple[int, RequestSpec]]]  # in arrival order; when (ns) some are cancelled


def _vllm(workload: Line) -> Recorded:
    requests = vllm_requests(workload)
    specs = _timed([spec for spec, _ in requests], 1000)
    return specs, [(at * 1000, spec) for spec, (_, at) in zip(specs, requests, strict=True) if at is not None]


def _transformers(workload: Line, step_ns: int) -> Recorded:
    reason = unsupported(workload)
    if reason:
        raise ValueError(reason)
    arriving = TransformersRequests(workload, workload["cb"]["block_size"]).arriving
    specs = _timed([spec for at in sorted(arriving) for spec in arriving[at]], step_ns)
    by_id = {spec.id: spec for spec in specs}
    return specs, [(c["step"] * step_ns, by_id[c["id"]]) for c in workload.get("cancels", [])]


def _timed(specs: Sequence[RequestSpec], unit_ns: int) -> list[RequestSpec]:
    """Return the requests with arrivals in ns instead of units. Samples stay those of the same request."""
    timed: dict[RequestSpec | None, RequestSpec] = {}
    for spec in specs:
        of = timed.get(spec.sample_of)
        timed[spec] = replace(spec, arrival_ns=spec.arrival_ns * unit_ns, sample_of=of)
    return list(timed.values())


class ChainedKeys:
    """A map from every distinct (everything before, block of tokens) to an id: exact, where a hash could collide."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._ids: dict[tuple[int, tuple[int, ...]], int] = {}

    def of(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return the ids of the full blocks of `tokens`."""
        keys: list[int] = []
        parent = -1
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            parent = self.after(parent, tokens[end - self.block_size : end])
            keys.append(parent)
        return tuple(keys)

    def after(self, parent: int, tokens: Sequence[int]) -> int:
        """Return the id of the block `tokens` behind the block `parent`, -1 for none. The block need not be full."""
        return self._ids.setdefault((parent, tuple(tokens)), len(self._ids))


def vllm_requests(workload: Line) -> list[tuple[RequestSpec, int | None]]:
    """Return (spec, abort time) in arrival order, then file order. All times are microseconds."""
    config = workload["config"]
    size = 1 if "spec" in config else config["block_size"]  # heads tell prompts apart by the token behind a block
    keys = ChainedKeys(size)
    specs: list[tuple[RequestSpec, int | None]] = []
    for r in workload["requests"]:
        first = None
        samples = {f"{i}_{r['id']}": output for i, output in enumerate(r.get("outputs", ()))}
        for name, declared in (samples or {r["id"]: r["output_token_ids"]}).items():
            stops = r.get("stop") and STOP_TOKEN in declared
            output = declared[: declared.index(STOP_TOKEN) + 1] if stops else declared
            tokens = [*r["prompt_token_ids"], *output]
            spec = RequestSpec(
                index=len(specs),
                id=name,
                arrival_ns=r["arrival_us"],
                prompt_tokens=len(r["prompt_token_ids"]),
                output_tokens=len(output),
                max_tokens=r.get("max_tokens", len(declared)),
                priority=r.get("priority", 0),
                prefix=keys.of(tokens),
                prefix_block_tokens=size,
                prefix_tokens=len(tokens),
                sample_of=first,
                computed_elsewhere=bool(r.get("kv", {}).get("do_remote_prefill")),
                fetched_later=bool(r.get("kv", {}).get("do_remote_decode")),
            )
            first = first or spec
            specs.append((spec, r.get("abort_us")))
    return sorted(specs, key=lambda entry: entry[0].arrival_ns)


def unsupported(workload: Line) -> str | None:
    """Return the reason why this policy does not model a workload, or None if it does."""
    other = set(workload.get("model", {}).get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    return f"layers with {', '.join(sorted(other))} are not modelled" if other else None


def sample_names(request: Line) -> list[str]:
    """Return the ids of a request and of its children."""
    name = request["id"]
    return [name, *(f"{name}__child#{i}" for i in range(request.get("num_children") or 0))]


class Tokens:
    """The fake tokens of a workload, a function of request and position."""

    def __init__(self, workload: Line) -> None:
        self._vocab: int = workload.get("model", {}).get("vocab_size", 512)
        self._eos = workload.get("eos_token_id")
        self._requests = {name: r for r in workload["requests"] for name in sample_names(r)}

    def at(self, request_id: str, position: int) -> int:
        request = self._requests[request_id]
        eos_after, eos = request.get("eos_after"), self._eos
        if eos is not None and eos_after is not None and position == len(request["prompt"]) + eos_after - 1:
            return int(eos)
        digest = hashlib.blake2b(f"{request_id}:{position}".encode(), digest_size=4).digest()
        token: int = int.from_bytes(digest, "little") % self._vocab
        return (token + 1) % self._vocab if token == eos else token

    def outputs(self, request_id: str) -> int:
        """Return the number of tokens that the request generates."""
        request = self._requests[request_id]
        eos_after = request.get("eos_after") if self._eos is not None else None
        outputs: int = min(eos_after or request["max_new_tokens"], request["max_new_tokens"])
        return outputs


class TransformersRequests:
    """The requests by the loop pass in which they arrive, and their contents."""

    def __init__(self, workload: Line, block_size: int) -> None:
        self.tokens = Tokens(workload)
        self.arriving: dict[int, list[RequestSpec]] = {}
        self.block_size = block_size
        self.keys = ChainedKeys(block_size)
        self.texts: dict[RequestSpec, list[int]] = {}
        for request in workload["requests"]:
            first = None
            for name in sample_names(request):
                spec = self._add(name, request, first)
                first = first or spec

    def _add(self, name: str, request: Line, first: RequestSpec | None) -> RequestSpec:
        prompt, outputs = request["prompt"], self.tokens.outputs(name)
        tokens = [*prompt, *(self.tokens.at(name, len(prompt) + i) for i in range(outputs))]
        spec = RequestSpec(
            index=len(self.texts),
            id=name,
            arrival_ns=request.get("arrival_step", 0),
            prompt_tokens=len(prompt),
            output_tokens=outputs,
            max_tokens=request["max_new_tokens"],
            prefix=self.keys.of(tokens),
            prefix_block_tokens=self.block_size,
            prefix_tokens=len(tokens),
            sample_of=first,
        )
        self.texts[spec] = tokens
        self.arriving.setdefault(spec.arrival_ns, []).append(spec)
        return spec


MOST_GENERATED = 1_000_000
"""Bound on the tokens that a transformers test generates in all: each one's content is made up and hashed."""

Count = Annotated[int, Field(ge=1, le=10**9)]
Micros = Annotated[int, Field(ge=0, le=10**15)]  # 30 years
Token = Annotated[int, Field(ge=0, lt=2**31)]
Output = Annotated[list[Token], Field(min_length=1)]
Name = Annotated[str, Field(min_length=1, max_length=200)]


class VllmRequest(Form):
    """A request of a vLLM test; times in microseconds."""

    id: Name
    arrival_us: Micros
    prompt_token_ids: Annotated[list[Token], Field(min_length=1)]
    output_token_ids: Output | None = None
    outputs: Annotated[list[Output], Field(min_length=1)] | None = None
    max_tokens: Count = 1
    priority: Annotated[int, Field(ge=-(10**9), le=10**9)] = 0
    stop: bool = False
    abort_us: Micros | None = None

    @model_validator(mode="after")
    def _outputs_once(self) -> Self:
        if (self.output_token_ids is None) == (self.outputs is None):
            raise complaint("expected either output_token_ids, or outputs, those of several samples")
        return self


class TransformersRequest(Form):
    """A request of a transformers test; times in loop passes."""

    id: Name
    prompt: Annotated[list[Token], Field(min_length=1)]
    max_new_tokens: Count
    eos_after: Annotated[int, Field(ge=0)] | None = None
    arrival_step: Annotated[int, Field(ge=0, le=10**9)] = 0
    num_children: Annotated[int, Field(ge=0, le=1000)] | None = None


class Cancel(Form):
    """A cancelled request and its loop pass."""

    id: Name
    step: Annotated[int, Field(ge=0, le=10**9)]


class Blocks(Form):
    """The settings of the cache."""

    block_size: Annotated[int, Field(ge=1, le=10**6)]


class Model(Form):
    """The model whose tokens are made up."""

    vocab_size: Annotated[int, Field(ge=1, lt=2**31)] = 512


class Vllm(Form):
    """A test of vLLM."""

    config: Blocks
    requests: Annotated[list[VllmRequest], Field(min_length=1)]

    @model_validator(mode="after")
    def _ids_differ(self) -> Self:
        _distinct([request.id for request in self.requests])
        return self


class Transformers(Form):
    """A test of transformers."""

    cb: Blocks
    model: Model = Model()
    eos_token_id: Token | None = None
    requests: Annotated[list[TransformersRequest], Field(min_length=1)]
    cancels: list[Cancel] = Field(default_factory=list)

    @model_validator(mode="after")
    def _requests_are_possible(self) -> Self:
        known = _distinct([request.id for request in self.requests])
        for position, cancel in enumerate(self.cancels):
            if cancel.id not in known:
                raise complaint(f"got {shown(cancel.id)}, expected the id of a request", f"cancels.{position}.id")
        total = sum(
            min(r.eos_after or r.max_new_tokens, r.max_new_tokens) * (1 + (r.num_children or 0)) for r in self.requests
        )
        if total > MOST_GENERATED:
            raise complaint(f"say {total:,} tokens in all, must be <= {MOST_GENERATED:,}", "requests")
        return self


def _distinct(ids: list[str]) -> set[str]:
    known: set[str] = set()
    for position, name in enumerate(ids):
        if name in known:
            raise complaint(f"got {shown(name)}, expected an id that no request before has", f"requests.{position}.id")
        known.add(name)
    return known
