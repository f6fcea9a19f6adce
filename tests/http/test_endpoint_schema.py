"""schemathesis asks what the OpenAPI document allows, and what it does not: no answer is a surprise."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance
from support.endpoint_calls import Instant

from cbsim.http.app import App

schema = schemathesis.openapi.from_asgi("/openapi.json", App(Instant(max_model_len=4096)))


@pytest.mark.slow
@schema.parametrize()
@settings(max_examples=20, derandomize=True, deadline=None)
def test_every_answer_is_documented(case: schemathesis.Case) -> None:
    case.call_and_validate(checks=[not_a_server_error, status_code_conformance, response_schema_conformance])
