"""schemathesis asks what the OpenAPI document allows, and what it does not: no answer is a surprise."""

from __future__ import annotations

import asyncio
from typing import Any

import jsonschema_rs  # of schemathesis
import pytest
import schemathesis
from hypothesis import settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance
from support.endpoint_calls import Instant, answer_to, call

from cbsim.http.app import App

schema = schemathesis.openapi.from_asgi("/openapi.json", App(Instant(max_model_len=4096)))


TURN = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *(("/v1/completions", {"prompt": prompt}) for prompt in ("", [""], [], "x", ["x"], [1])),
        *(("/v1/completions", {"prompt": "x", "stop": letter * n}) for letter in "aé" for n in (0, 1, 256, 257)),
        *(("/tokenize", body) for body in ({}, {"prompt": None}, {"prompt": "x", "messages": [TURN]})),
        *(("/tokenize", body) for body in ({"prompt": ""}, {"messages": [TURN]}, {"prompt": None, "messages": [TURN]})),
    ],
)
def test_what_the_document_allows_is_what_is_accepted(path: str, body: dict[str, Any]) -> None:
    document = answer_to("/openapi.json").json
    (content,) = document["paths"][path]["post"]["requestBody"]["content"].values()
    allowed = jsonschema_rs.is_valid({**content["schema"], "components": document["components"]}, body)
    assert allowed == (answer_to(path, body).status == 200)


def test_every_method_that_is_answered_is_documented() -> None:
    for path, methods in answer_to("/openapi.json").json["paths"].items():
        for method in ("get", "post"):
            answer = asyncio.run(call(App(Instant()), path, {} if method == "post" else None, method.upper()))
            assert (method in methods) == (answer.status != 405), (method, path)


@pytest.mark.slow
@schema.parametrize()
@settings(max_examples=20, derandomize=True, deadline=None)
def test_every_answer_is_documented(case: schemathesis.Case) -> None:
    case.call_and_validate(checks=[not_a_server_error, status_code_conformance, response_schema_conformance])
