"""Recorded scheduler tests as files of a user: every field has a type and bounds, and what breaks them is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cbsim.errors import ScenarioError
from cbsim.workload import scheduler_tests

NAN = float("nan")


def vllm(**changes: Any) -> dict[str, Any]:
    request = {"id": "a", "arrival_us": 0, "prompt_token_ids": [1, 2], "output_token_ids": [3]} | changes
    return {"config": {"block_size": 16}, "requests": [{**request, "id": "first"}, request]}


def transformers(**changes: Any) -> dict[str, Any]:
    request = {"id": "a", "prompt": [1, 2], "max_new_tokens": 4, "arrival_step": 0} | changes
    return {"cb": {"block_size": 16}, "requests": [{**request, "id": "first"}, request]}


@pytest.mark.parametrize(
    ("workload", "words"),
    [
        (vllm(arrival_us=NAN), "requests.1.arrival_us: got nan, expected a whole number"),
        (vllm(arrival_us=-1), "requests.1.arrival_us: got -1, must be >= 0"),
        (vllm(arrival_us=10**16), "requests.1.arrival_us: got 10000000000000000, must be <= 1000000000000000"),
        (vllm(prompt_token_ids=5), "requests.1.prompt_token_ids: got 5, expected a list"),
        (vllm(prompt_token_ids=[1, [2]]), "requests.1.prompt_token_ids.1: got [2], expected a whole number"),
        (vllm(output_token_ids=[]), "requests.1.output_token_ids: got [], needs at least 1 entries"),
        (vllm(priority=None), "requests.1.priority: got nothing, expected a whole number"),
        (vllm(id="first"), "requests.1.id: got 'first', expected an id that no request before has"),
        (vllm() | {"config": {"block_size": 0}}, "config.block_size: got 0, must be >= 1"),
        (vllm() | {"requests": 3}, "requests: got 3, expected a list"),
        (transformers(arrival_step=NAN), "requests.1.arrival_step: got nan, expected a whole number"),
        (transformers(max_new_tokens=0), "requests.1.max_new_tokens: got 0, must be >= 1"),
        (transformers(max_new_tokens=10**9), "requests: say 2,000,000,000 tokens in all, must be <= 1,000,000"),
        (transformers() | {"cancels": [{"step": 1, "id": "b"}]}, "cancels.0.id: got 'b', expected the id of a request"),
    ],
)
def test_a_field_of_the_wrong_type_or_size_is_named(tmp_path: Path, workload: dict[str, Any], words: str) -> None:
    """NaN did not end, negative times and sizes were served, other types ended in a traceback."""
    path = tmp_path / "w.json"
    path.write_text(json.dumps(workload))
    with pytest.raises(ScenarioError) as caught:
        scheduler_tests.golden(path, 0.01)
    assert f"{path}: {words}" in str(caught.value).splitlines()


@pytest.mark.parametrize("workload", [vllm(), transformers()])
def test_the_forms_themselves_are_read(tmp_path: Path, workload: dict[str, Any]) -> None:
    """What the cases above change one field of is a workload; fields that nobody asks for are left alone."""
    (tmp_path / "w.json").write_text(json.dumps(workload | {"notes": NAN}))
    assert len(scheduler_tests.golden(tmp_path / "w.json", 0.01).specs) == 2
