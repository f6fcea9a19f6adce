"""Two engines behind `cbsim route`: answers are those of an engine alone, and a killed one loses no request."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("transformers", reason="texts are read by transformers")
pytest.importorskip("uvicorn", reason="clients are served")
openai = pytest.importorskip("openai", reason="clients are served")

from support import calls
from support.engine.calls import started

ROOM = ("--set", "kv_cache.num_blocks=1024")
TOKENS = 120
PROMPTS = [f"the server is number {at}" for at in range(6)]


def fields(prompt: str) -> dict[str, Any]:
    """A request whose answer is the same wherever it is computed."""
    return {"model": "m", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "extra_body": {"ignore_eos": True}}


async def text_of(stream: Any) -> str | None:
    """The text of a stream; None if it ends with an error."""
    try:
        return "".join([part.choices[0].text async for part in stream])
    except openai.APIError:
        return None


async def alone(address: str) -> dict[str, str]:
    async with openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as client:
        return {prompt: (await client.completions.create(**fields(prompt))).choices[0].text for prompt in PROMPTS}


async def routed(address: str, kill: Callable[[], None]) -> tuple[list[str | None], list[str]]:
    """The texts of streams that have begun when a server is killed, and of answers as a whole, under way then or sent
    later; each for all prompts.
    """
    async with openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as client:
        streams = [await client.completions.create(**fields(prompt), stream=True) for prompt in PROMPTS]
        texts = [asyncio.create_task(text_of(stream)) for stream in streams]
        whole = [asyncio.create_task(client.completions.create(**fields(prompt))) for prompt in PROMPTS]
        await asyncio.sleep(0)
        kill()
        whole += [asyncio.create_task(client.completions.create(**fields(prompt))) for prompt in PROMPTS]
        return await asyncio.gather(*texts), [(await each).choices[0].text for each in whole]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_engine_loses_no_request_and_changes_no_answer(tmp_path: Path) -> None:
    """Streams that have begun at the killed engine fail, as documented; all other answers are those of one alone."""
    words = ("serve", "tiny_cpu", *ROOM, "--device", "inline", "--served-model-name", "m", "--port", 0, "--grace", 0)
    options = ("--router", "round_robin", "--port", 0, "--out", tmp_path)
    with started(*words, "--out", tmp_path) as killed, started(*words, "--out", tmp_path) as left:
        assert killed.stdout is not None and left.stdout is not None
        addresses = [each.stdout.readline().split(" at ")[1].partition(",")[0] for each in (killed, left)]
        expected = asyncio.run(alone(addresses[1]))
        assert asyncio.run(alone(addresses[0])) == expected and len({*expected.values()}) > 1
        with calls.started("cbsim", "route", *addresses, *options) as front:
            assert front.stdout is not None
            address, run = front.stdout.readline().split(" at ")[1].strip(), Path(front.stdout.readline().split()[1])
            streams, whole = asyncio.run(routed(address, killed.kill))
            front.send_signal(signal.SIGINT)
            out, err = front.communicate(timeout=60)
            assert front.returncode == 0, err
    assert whole == [expected[prompt] for prompt in PROMPTS * 2]
    pairs = zip(streams, PROMPTS, strict=True)
    ends = Counter("failed" if text is None else text == expected[prompt] for text, prompt in pairs)
    assert ends == {"failed": 3, True: 3}
    assert "18 requests: 15 finished, 0 refused, 0 cancelled, 3 failed" in out
    said = calls.call("replan", run)
    assert said.status == 0 and "choices identical" in said.out
    assert int(said.out.split(" of ")[0].rsplit(" ", 1)[1]) > 18, "requests without a byte were sent again"
