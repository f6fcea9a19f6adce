"""Clients of the tests of `drive`: what somebody else might have written."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any

import openai


async def call(client: openai.AsyncOpenAI, model: str, at_s: float) -> tuple[int, float, float]:
    await asyncio.sleep(at_s)
    began, first, count = time.perf_counter(), 0.0, 0
    stream = await client.completions.create(model=model, prompt="one two three", max_tokens=9, stream=True)
    async for chunk in stream:
        first = first or time.perf_counter() - began
        count += bool(chunk.choices and chunk.choices[0].text)
    return count, first, time.perf_counter() - began


async def main() -> list[Any]:
    """The address and the key come from the environment, the number of requests from the command line."""
    async with openai.AsyncOpenAI() as client:
        model = (await client.models.list()).data[0].id
        return await asyncio.gather(*(call(client, model, at / 50) for at in range(int(sys.argv[1]))))


async def told_where(address: str) -> str:
    assert address == os.environ["OPENAI_BASE_URL"]
    return f"at {address.rpartition(':')[0]}"


async def sleeps() -> float:
    """In the middle of an answer, and not as a client should."""
    async with openai.AsyncOpenAI() as client:
        model = (await client.models.list()).data[0].id
        stream = await client.completions.create(model=model, prompt="one two three", max_tokens=20, stream=True)
        async for _ in stream:
            time.sleep(0.5)
    return time.perf_counter()


async def fails() -> None:
    raise OSError("no such\nthing")


async def waits() -> None:
    await asyncio.Event().wait()


def plain() -> int:
    return 3


async def in_a_thread() -> None:
    """A synchronous client, which waits for a server that waits for its thread."""
    with openai.OpenAI(max_retries=0, timeout=5) as client:
        await asyncio.to_thread(client.completions.create, model="rates", prompt="hello", max_tokens=2)
