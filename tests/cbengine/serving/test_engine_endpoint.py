"""OpenAI's clients against a real engine, over a socket: its texts, a client that leaves, the end of a session."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from cbsim.runs import reading

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("transformers", reason="folders are written, and texts read, by transformers")

from openai import AsyncOpenAI
from support.calls import runs
from support.endpoint_calls import listening
from support.engine import folders
from support.engine.served import LOOPS
from support.engine.talking import placed
from transformers import AutoModelForCausalLM, AutoTokenizer

from cbengine.build import Setup
from cbengine.device.base import DeviceError, Inline
from cbengine.serving.backend import EngineBackend
from cbengine.serving.command import EngineOptions, opened
from cbsim.http.listen import ServeOptions, listen, serve
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
    with placed():
        return opened(
            requested, Setup(device="inline", weights=weights), EngineOptions("python -m cbengine serve tiny_cpu")
        )


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


async def test_a_stream_says_what_a_whole_answer_says() -> None:
    """Of the scenario's own random model, with the tokenizer that comes with cbsim. Every token is a chunk."""
    served = backend("async")
    greedy: Any = {"model": "tiny_cpu", "messages": MESSAGES, "max_completion_tokens": 16, "temperature": 0}
    async with client_of(served) as client:
        whole = await client.chat.completions.create(**greedy)
        options: Any = {"stream_options": {"include_usage": True}}
        stream = await client.chat.completions.create(**greedy, **options, stream=True)
        head, *chunks, usage = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == whole.choices[0].message.content
    assert head.choices[0].delta.role == "assistant"
    assert len(chunks) == usage.usage.completion_tokens == whole.usage.completion_tokens
    assert usage.usage.prompt_tokens_details.cached_tokens == 0
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


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


def test_a_dead_server_is_said_to_its_clients(tmp_path: Path) -> None:
    """The answer under way ends with the reason, the exit status is 1, and the directory says why."""
    served = backend("sync")
    launch, launched = Inline.launch, 0

    def fail(self: Any, *step: Any) -> None:
        nonlocal launched
        launched += 1
        if launched == 4:
            raise DeviceError("the worker process ended with exit code 3")
        launch(self, *step)

    async def session() -> tuple[int, str]:
        options = ServeOptions("127.0.0.1", 0, tmp_path, Settings(grace_s=60.0), quiet=True)
        port = asyncio.get_running_loop().create_future()
        real = listen

        async def emitted(*words: Any, **more: Any) -> Any:
            return await real(*words, **{**more, "ready": lambda _, number: port.set_result(number)})

        with mock.patch("cbsim.http.listen.listen", emitted):
            work = asyncio.create_task(serve(served, options))
            url = f"http://127.0.0.1:{await port}/v1"
            async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
                with pytest.raises(Exception, match="exit code 3") as error:
                    await client.completions.create(model="tiny_cpu", prompt="x", max_tokens=50)
                return await work, str(error.value)

    with mock.patch.object(Inline, "launch", fail):
        status, message = asyncio.run(session())
    assert status == 1
    assert "500" in message
    (path,) = runs(tmp_path)
    assert (path / "INCOMPLETE").read_text() == "the worker process ended with exit code 3\n"
