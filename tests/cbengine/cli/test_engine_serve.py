"""`cbengine serve` as a command: how a session ends, and a user's mistakes."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cbsim.runs import reading

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("transformers", reason="folders are written, and texts read, by transformers")
pytest.importorskip("openai", reason="clients are served")
pytest.importorskip("uvicorn", reason="clients are served")

from openai import OpenAI
from support.calls import runs
from support.engine.calls import call, refused, started

from cbsim.http.tokenizer import EMBEDDED
from cbsim.runs import replan


@contextlib.contextmanager
def serving(out: Path, *words: object) -> Iterator[tuple[subprocess.Popen[str], OpenAI]]:
    """The command in a process of its own, and a client of it."""
    with started("serve", "tiny_cpu", *words, "--port", 0, "--out", out, "--quiet") as process:
        assert process.stdout and process.stderr
        line = process.stdout.readline()
        place = re.search(r"http://\S+/v1", line)
        assert place, line + process.stderr.read()
        with OpenAI(base_url=place[0], api_key="none", max_retries=0) as client:
            yield process, client


def long_answer(client: OpenAI, tokens: int) -> Any:
    more: Any = {"extra_body": {"ignore_eos": True}}
    return iter(client.completions.create(model="tiny_cpu", prompt="x", max_tokens=tokens, stream=True, **more))


@pytest.mark.parametrize("device", ["inline", "process"])
def test_a_request_to_end_lets_answers_end(device: str, tmp_path: Path) -> None:
    """SIGTERM in the middle of an answer: it comes to its end, the process exits with 0, the directory is whole."""
    with serving(tmp_path, "--device", device) as (process, client):
        answer = long_answer(client, 60)
        first = next(answer)
        process.send_signal(signal.SIGTERM)
        chunks = [first, *answer]
        assert len(chunks) == 60
        assert chunks[-1].choices[0].finish_reason == "length"
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out, err) == (0, "", "")
    (path,) = runs(tmp_path)
    run = reading.load(path)
    assert run.incomplete is None
    assert [row.status for row in run.requests] == ["length"]
    assert replan.rederive(path) == (len(run.steps), len(run.steps), None)
    command = run.environment["command"]
    assert command.startswith("python -m cbengine serve tiny_cpu ") and f" --device {device}" in command


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--host", "0.0.0.0"), ("host 0.0.0.0 is open to other machines", "API key")),
        (("--tokenizer", "nowhere"), ("nowhere/tokenizer.json: cannot be read",)),
        (("--model", "nowhere"), ("nowhere/tokenizer.json: cannot be read",)),
        (("--device", "modelled"), ("argument --device", "'modelled'")),
        (("--set", "scheduler={name: beam}"), ("scheduler.name: got beam, which searches",)),
        (("--set", "model.intermediate=1e12"), ("model: the weights of Tiny take up to", "GB free")),
    ],
)
def test_mistakes_are_one_message(words: tuple[str, ...], says: tuple[str, ...]) -> None:
    device = () if "--device" in words else ("--device", "inline")
    refused(call("serve", "tiny_cpu", "--port", "0", *device, *words), 2, *says)


def test_a_tokenizer_of_another_model_is_refused(folder: Path) -> None:
    said = call("serve", "tiny_cpu", "--port", 0, "--device", "inline", "--model", folder, "--tokenizer", EMBEDDED)
    refused(said, 2, "the tokenizer has 4096 tokens, the model ", "they do not belong together")


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    """One message, and no directory of a session that never was."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = call("serve", "tiny_cpu", "--port", port, "--device", "inline", "--out", tmp_path / "runs")
    refused(said, 2, f"cannot listen on 127.0.0.1:{port}")
    assert not (tmp_path / "runs").exists()
