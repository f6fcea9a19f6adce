"""`python -m cbsim serve`, from its first line to its exit status, talked to by openai's client and by curl."""

from __future__ import annotations

import re
import signal
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest
from support.calls import call, refused
from support.serving import serving

from cbsim.runs import reading
from cbsim.runs.replan import rederive

FAST = ("--set", "cost={kind: constant, step_s: 0.002}")
LONG = ("--set", "cost={kind: constant, step_s: 0.5}")


def test_a_session_from_its_first_line_to_its_run(tmp_path: Path) -> None:
    with serving(tmp_path, *FAST) as session, session.openai() as client:
        model = client.models.list().data[0]
        assert model.id == "tiny_cpu"
        asked: Any = {"model": model.id, "extra_body": {"ignore_eos": True}}
        hello = [{"role": "user", "content": "hello"}]
        whole = client.chat.completions.create(messages=hello, max_completion_tokens=7, **asked)
        assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("length", 7)
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
        parts = [*client.completions.create(prompt="hello", max_tokens=5, **asked)]
        assert sum(bool(part.choices) for part in parts) == 5, "a chunk a token"
        assert parts[-1].usage.completion_tokens == 5
        status, out, complaint = session.end(signal.SIGTERM)
    assert status == 0, complaint
    assert "Traceback" not in complaint
    (run,) = tmp_path.iterdir()
    assert f"run       {run}" in out
    loaded = reading.load(run)
    assert loaded.incomplete is None
    assert [row.output_tokens for row in loaded.requests] == [7, 5]
    assert {"faithful", "lag_p99_s", "late_steps"} <= set(loaded.summary["served"])
    assert rederive(run) == (len(loaded.steps), len(loaded.steps), None)


@pytest.mark.parametrize("hurry", [("--grace", "0.1"), ()])
def test_answers_that_are_cut_off_make_an_incomplete_run(tmp_path: Path, hurry: tuple[str, ...]) -> None:
    """Out of time, or told twice. What happened until then can be read."""
    with serving(tmp_path, *LONG, *hurry) as session, session.openai() as client:
        stream = client.completions.create(
            model="tiny_cpu", prompt="hello", max_tokens=60, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        status, _, complaint = session.end(signal.SIGTERM, *(() if hurry else (signal.SIGINT,)))
        stream.close()
    assert status == 1
    assert "incomplete: 1 answer was cut off" in complaint
    assert "Traceback" not in complaint
    (run,) = tmp_path.iterdir()
    loaded = reading.load(run)
    assert loaded.incomplete
    assert [row.status for row in loaded.requests] == ["aborted"]


def test_a_scale_that_nobody_keeps_is_told(tmp_path: Path) -> None:
    """A thousand times as fast: everything comes late, the model's times stay, and the figures are marked."""
    with serving(tmp_path, *FAST, "--clock", "scale=1000") as session, session.openai() as client:
        client.completions.create(model="tiny_cpu", prompt="hello", max_tokens=64, extra_body={"ignore_eos": True})
        with urllib.request.urlopen(session.address.replace("/v1", "/metrics")) as answer:
            metrics = answer.read().decode()
            assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        status, _, complaint = session.end(signal.SIGINT)
    assert status == 0
    assert "cbsim_time_scale" in metrics
    (run,) = tmp_path.iterdir()
    served = reading.load(run).summary["served"]
    assert served["time_scale"] == 1000
    assert served["faithful"] == ("not faithful" not in complaint)
    late = float(re.search(r"^cbsim_late_steps_total(?:\{.*\})? (\S+)$", metrics, re.MULTILINE)[1])  # type: ignore[index]
    assert late <= served["late_steps"]


def test_a_key_is_asked_for(tmp_path: Path) -> None:
    with serving(tmp_path, *FAST, CBSIM_API_KEY="secret") as session, session.openai() as client:
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
        assert client.with_options(api_key="secret").models.list().data


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nothing"], "unknown scenario 'nothing'"),
        (["tiny_cpu", "--host", "0.0.0.0"], "host 0.0.0.0 is open to other machines"),
        (["tiny_cpu", "--tokenizer", "nowhere"], "nowhere"),
        (["tiny_cpu", "--api-key-file", "nowhere"], "nowhere: cannot be read"),
    ],
)
def test_what_cannot_be_served(arguments: list[str], complaint: str, tmp_path: Path) -> None:
    refused(call("serve", *arguments, "--out", tmp_path / "runs"), 2, complaint)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "arguments", [["--port", "70000"], ["--clock", "scale=0"], ["--clock", "fast"], ["--grace", "-1"]]
)
def test_arguments_that_are_none(arguments: list[str]) -> None:
    said = call("serve", "tiny_cpu", *arguments)
    assert said.status == 2 and arguments[1] in said.err
