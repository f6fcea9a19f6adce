"""Calibrated terms: which hold for a server, and what a scenario makes of them."""

from __future__ import annotations

import pytest

from cbsim.errors import ScenarioError
from cbsim.scenario import catalog, scenario, terms

VALUES = {"step_s": 1.0, "reduce_s@2": 2.0, "reduce_s@8": 8.0, "layer_s@0.16.0": 3.0, "large_products@h100_sxm": 4.0}


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        ((2, "h100_sxm", "0.16.0"), {"step_s": 1.0, "reduce_s": 2.0, "layer_s": 3.0, "large_products": 4.0}),
        ((8, "h100_sxm", "0.18.0"), {"step_s": 1.0, "reduce_s": 8.0, "layer_s": 3.0, "large_products": 4.0}),
        ((16, "a100_sxm", ""), {"step_s": 1.0, "reduce_s": 8.0, "layer_s": 3.0, "large_products": 4.0}),
    ],
)
def test_a_term_holds_for_what_it_names_else_the_last_does(
    server: tuple[int, str, str], expected: dict[str, float]
) -> None:
    assert terms.resolve(VALUES, *server) == expected


@pytest.mark.parametrize("name", catalog.names("terms"))
def test_the_projects_terms_are_whole(name: str) -> None:
    """Every curve has residuals, of no other users than the file says."""
    file = terms.load(name)
    assert all(curve.residuals for curve in file.curves.values())
    users = [each.users for curve in file.curves.values() for each in curve.residuals]
    assert (min(users), max(users)) == file.users


def cost(**fields: object) -> str:
    values = {"kind": "table", "path": "card", "engine": "vllm", **fields}
    return f"cost={{{', '.join(f'{name}: {value}' for name, value in values.items())}}}"


def test_terms_fill_what_is_not_given() -> None:
    file = terms.load("vllm-experts")
    made = scenario.load("rates", [cost(tensor_parallel=8, terms="vllm-experts", step_s=0.5)]).cost
    assert made.step_s == 0.5
    assert made.reduce_s == file.terms["reduce_s@8"].value
    assert made.calibrated.models == file.models
    again = scenario.load("rates", [f"cost={made.model_dump_json()}"]).cost
    assert again == made, "a resolved scenario is read as it is"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"terms": "unheard-of"}, r"cost\.terms: got 'unheard-of', expected one of .*vllm-experts"),
        ({"terms": "vllm-experts", "engine": "null"}, r"cost\.terms: needs engine"),
        ({"engine": "tgi"}, r"cost\.engine: got 'tgi'"),
    ],
)
def test_mistakes_name_the_field(change: dict[str, object], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        scenario.load("rates", [cost(**change)])
