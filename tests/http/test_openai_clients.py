"""OpenAI's own clients, asynchronous and not, over a socket."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from openai import OpenAI
from support.endpoint_calls import embedded, listening, saying, scripted

from cbsim.http.settings import VARIABLE, Settings, read_keys

TEXT = "A step is scheduled, launched and awaited; then its tokens are told. 👣"
MESSAGES = [{"role": "user", "content": "What is a step?"}]


async def test_the_asynchronous_client() -> None:
    async with listening(scripted(saying(TEXT))) as server, server.openai() as client:
        assert [model.id async for model in await client.models.list()] == ["scripted"]
        whole = await client.chat.completions.create(model="scripted", messages=MESSAGES)
        assert whole.choices[0].message.content == TEXT and whole.choices[0].finish_reason == "stop"
        options = {"stream": True, "stream_options": {"include_usage": True}}
        stream = await client.chat.completions.create(model="scripted", messages=MESSAGES, **options)
        *chunks, last = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
        tokens = embedded().encode(TEXT)
        assert last.usage.completion_tokens == len(tokens) == whole.usage.completion_tokens
        many = await asyncio.gather(
            *(client.completions.create(model="scripted", prompt=f"{n}", max_tokens=5) for n in range(32))
        )
        assert len({answer.id for answer in many}) == 32
        assert {answer.choices[0].text for answer in many} == {embedded().decode(tokens[:5])}
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.BadRequestError, match="`n` is not supported"):
            await client.completions.create(model="scripted", prompt="x", n=2)


async def test_the_synchronous_client() -> None:
    def call(address: str) -> None:
        wrong = OpenAI(base_url=address, api_key="wrong", max_retries=0)
        with wrong, pytest.raises(openai.AuthenticationError):
            wrong.models.list()
        options: Any = {"model": "scripted", "prompt": [1, 2, 3], "max_tokens": 99}
        with OpenAI(base_url=address, api_key="right", max_retries=0) as client:
            chunks = client.completions.create(**options, stream=True, stop="awaited")
            assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT[: TEXT.index("awaited")]

    settings = Settings(keys=read_keys(environment={VARIABLE: "right"}))
    async with listening(scripted(saying(TEXT)), settings) as server:
        await asyncio.to_thread(call, server.address)
