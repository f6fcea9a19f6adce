"""The form of recorded scheduler tests, of vLLM and of transformers: what a file must hold, with types and bounds.

Fields that no request follows from are left alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cbsim.scenario.documents import Document
from cbsim.scenario.fields import complaint, shown

MOST_GENERATED = 1_000_000
"""Tokens that the requests of a transformers test say in all: each one's content is made up and hashed."""

Count = Annotated[int, Field(ge=1, le=10**9)]
Micros = Annotated[int, Field(ge=0, le=10**15)]  # 30 years
Token = Annotated[int, Field(ge=0, lt=2**31)]
Output = Annotated[list[Token], Field(min_length=1)]
Name = Annotated[str, Field(min_length=1, max_length=200)]


class Form(BaseModel):
    """Types as in the file: nothing is converted."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class VllmRequest(Form):
    """Times in microseconds."""

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
    def _says_something(self) -> VllmRequest:
        if (self.output_token_ids is None) == (self.outputs is None):
            raise complaint("expected either output_token_ids, or outputs, those of several samples")
        return self


class TransformersRequest(Form):
    """Times in loop passes."""

    id: Name
    prompt: Annotated[list[Token], Field(min_length=1)]
    max_new_tokens: Count
    eos_after: Annotated[int, Field(ge=0)] | None = None
    arrival_step: Annotated[int, Field(ge=0, le=10**9)] = 0
    num_children: Annotated[int, Field(ge=0, le=1000)] | None = None


class Cancel(Form):
    """Who gives up, in which loop pass."""

    id: Name
    step: Annotated[int, Field(ge=0, le=10**9)]


class Blocks(Form):
    """Of the cache."""

    block_size: Annotated[int, Field(ge=1, le=10**6)]


class Model(Form):
    """Whose tokens are made up."""

    vocab_size: Annotated[int, Field(ge=1, lt=2**31)] = 512


class Vllm(Form):
    """A test of vLLM."""

    config: Blocks
    requests: Annotated[list[VllmRequest], Field(min_length=1)]

    @model_validator(mode="after")
    def _ids_differ(self) -> Vllm:
        _distinct([request.id for request in self.requests])
        return self


class Transformers(Form):
    """A test of transformers."""

    cb: Blocks
    model: Model = Model()
    eos_token_id: Token | None = None
    requests: Annotated[list[TransformersRequest], Field(min_length=1)]
    cancels: list[Cancel] = []

    @model_validator(mode="after")
    def _ids_are_known(self) -> Transformers:
        known = _distinct([request.id for request in self.requests])
        for place, cancel in enumerate(self.cancels):
            if cancel.id not in known:
                raise complaint(f"got {shown(cancel.id)}, expected the id of a request", f"cancels.{place}.id")
        return self

    @model_validator(mode="after")
    def _says_not_too_much(self) -> Transformers:
        said = sum(
            min(r.eos_after or r.max_new_tokens, r.max_new_tokens) * (1 + (r.num_children or 0)) for r in self.requests
        )
        if said > MOST_GENERATED:
            raise complaint(f"say {said:,} tokens in all, must be <= {MOST_GENERATED:,}", "requests")
        return self


def _distinct(ids: list[str]) -> set[str]:
    known: set[str] = set()
    for place, name in enumerate(ids):
        if name in known:
            raise complaint(f"got {shown(name)}, expected an id that no request before has", f"requests.{place}.id")
        known.add(name)
    return known


def check(path: Path, layout: type[Form], workload: dict[str, Any]) -> None:
    """Raises ScenarioError with the field, its value and what would be allowed."""
    try:
        layout.model_validate(workload)
    except ValidationError as error:
        raise Document(str(path), None, {}).explain(error) from None
