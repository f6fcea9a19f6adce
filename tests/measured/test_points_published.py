"""Published servers by the project's own terms: a stratum that its terms were calibrated without."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from support.reference import data

from cbsim.measured.points import build, published, score
from cbsim.scenario import catalog, terms
from cbsim.sweeps.work import Here

MEASURED = f"{published.FOLDER}/measured.csv.gz"


def test_a_stratum_is_predicted_without_its_own_curve() -> None:
    """Llama-3.1-70B on two H100: five servers, about 2 s. Well within what was found of all: this is no calibration."""
    where = {"system": "h100_sxm", "backend": "vllm", "model_path": "meta-llama/Llama-3.1-70B", "tp_size": "2"}
    buildable, reasons = score.sort(published.read(data(MEASURED).parent, where))
    assert len(buildable) == 5 and not reasons
    assert {each.file.name for each in buildable} == {"vllm-dense"}
    assert all(each.point.curve in each.file.curves for each in buildable)
    means = score.predict([each.scenario for each in buildable], Here())
    predicted = [score.predicted(each, m) for each, m in zip(buildable, means, strict=True)]
    report = json.loads((catalog.ROOT / "reports" / "fidelity" / "points" / "report.json").read_text())["data"]
    published_ms = {each["id"]: each["predicted_ms"] for each in report["predicted"]}
    assert {each.point.id: pytest.approx(published_ms[each.point.id], rel=1e-3) for each in predicted} == {
        each.point.id: list(each.means) for each in predicted
    }, "what is published is what the code computes: .ci/reports published makes it again"
    group = score.Group("two H100", predicted)
    assert group.errors("tpot").mape < 0.08
    assert abs(group.errors("ttft").median) < 0.2


def test_what_can_be_built_and_why_the_rest_cannot() -> None:
    """Every point is built or has a reason; prefill and decode apart are the most."""
    points = published.read(data(MEASURED).parent)
    reasons = Counter[str]()
    for point in points:
        try:
            build.check(point)
        except build.CannotBuildError as error:
            reasons[str(error)] += 1
    apart = sum(point.mode == "disagg" for point in points)
    assert reasons["prefill and decode are apart, on servers of their own"] == apart
    assert all(reason.startswith(("prefill", "no kernel tables of ")) for reason in reasons)
    systems = {system for file in terms.every() for system in file.systems}
    assert systems <= {point.system for point in points}
