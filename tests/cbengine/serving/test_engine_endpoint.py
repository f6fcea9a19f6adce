"""OpenAI's clients against a real engine, over a socket: its texts, a client that leaves, the end of a session."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cbsim.runs import reading

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("transformers", reason="folders are written, and texts read, by transformers")
pytest.importorskip("openai", reason="clients are served")
pytest.importorskip("uvicorn", reason="clients are served")

from support.endpoint_calls import listening
from support.engine import folders
from support.engine.served import LOOPS
from transformers import AutoModelForCausalLM, AutoTokenizer

from cbengine.build import Setup
from cbengine.serving.backend import EngineBackend, opened
from cbsim.http.settings import Settings
from cbsim.runs import replan
from cbsim.runs.served import SessionDirectory, with_one_loop
from cbsim.scenario import scenario

MESSAGES: Any = [{"role": "user", "content": "What is a step?"}]
PROMPTS = ["the quick brown fox", "the quick brown fox jumps over", "a lazy dog: naïve", "the"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.write(tmp_path_factory.mktemp("served") / "tiny-llama")


def backend(loop: str, weights: Path | None = None) -> EngineBackend:
    requested = with_one_loop(scenario.load("tiny_cpu", [f"loop.mode={loop}", "model.layers=1", "model.hidden=64"]))
    return opened(requested, Setup(device="inline", weights=weights), "python -m cbengine serve tiny_cpu")


@contextlib.asynccontextmanager
async def client_of(served: EngineBackend) -> AsyncIterator[Any]:
    async with listening(served, Settings(grace_s=60.0)) as server, server.openai() as client:
        yield client
    assert not server.ending.result().message


def checked(served: EngineBackend, folder: Path) -> reading.Run:
    """The session's run directory, whose plans follow from it."""
    directory = SessionDirectory(served.session, served.log, folder)
    directory.write({})
    verdict, run = replan.rederive(directory.path), reading.load(directory.path)
    assert verdict == (len(run.steps), len(run.steps), None), verdict
    return run


@pytest.mark.parametrize("loop", LOOPS)
async def test_texts_of_a_folders_model_are_transformers_own(loop: str, folder: Path, tmp_path: Path) -> None:
    """Greedy completions at a time, in text, are those of `generate` and the tokenizer of the folder for each alone,
    but for half a character at the end. The model is called as its folder is.
    """
    reader, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    served = backend(loop, folder)
    async with client_of(served) as client:
        assert [card.id async for card in client.models.list()] == ["tiny-llama"]
        greedy: Any = {"model": "tiny-llama", "max_tokens": 20, "temperature": 0}
        answers = await asyncio.gather(*(client.completions.create(**greedy, prompt=prompt) for prompt in PROMPTS))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = reader(prompt, return_tensors="pt")["input_ids"]
        tokens = model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=folders.END)[0, ids.shape[1] :]
        assert answer.choices[0].text == reader.decode(tokens, skip_special_tokens=True).rstrip("\ufffd")
        assert answer.choices[0].finish_reason == ("stop" if folders.END in tokens else "length")
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (ids.shape[1], len(tokens))
    assert len(checked(served, tmp_path).requests) == len(PROMPTS)


async def test_a_client_that_closes_its_stream_gives_up_its_request(tmp_path: Path) -> None:
    served = backend("async")
    async with client_of(served) as client:
        more: Any = {"extra_body": {"ignore_eos": True}}
        stream = await client.completions.create(model="tiny_cpu", prompt="x", max_tokens=2000, stream=True, **more)
        async for _ in stream:
            break
        await stream.close()
        await client.completions.create(model="tiny_cpu", prompt="y", max_tokens=3)
    left, other = checked(served, tmp_path).requests
    assert (left.status, other.status) == ("aborted", "length")
    assert 0 < sum(left.token_runs[1::2]) < 2000
