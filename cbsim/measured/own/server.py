"""The server under measurement: what it reports of itself, readings of its /metrics, completions with their times.
Nothing is sent anywhere but to its address: redirects are not followed, proxies are not used.
"""

from __future__ import annotations

import ast
import json
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openai
from pydantic import ValidationError

from cbsim.errors import ScenarioError, in_line
from cbsim.files import read_text
from cbsim.measured.own.clients import Measured
from cbsim.measured.own.measurement import Facts
from cbsim.scenario.fields import cut, near

PATIENCE_S = 60.0  # within which the next byte has to come
IDS = (1000, 4000)  # of random prompts: every large vocabulary has them, none of its special tokens are among them
PROBE = (256, 16)  # tokens of the request that shows whether a server can be measured
ENGINES = {"vllm": 16, "sglang": 1, "cbsim": 16}  # and the tokens in a block by default
FACTS = {"page_size": "block_size", "num_gpu_blocks": "num_blocks", "context_length": "max_model_len"}
"""Names of facts in what servers report, where these are others."""
CACHE_TOKENS = "max_total_num_tokens"
NUMBER = r"-?\d{1,30}(?:\.\d+)?(?:e[-+]?\d\d)?"
METRIC = re.compile(rf"^(vllm|sglang):(\w+?)(?:_total)?(?:{{(.*)}})? ({NUMBER})$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
FLAG = re.compile(r"""['"]?(\w+)['"]?\s*[=:]\s*('[^']*'|"[^"]*"|True|False|None|[-+.e\d]+)(?=[,)}\s]|$)""")
STARTS = ("non-default args: ", "server_args=", "max_total_num_tokens=")  # lines of vLLM's and of SGLang's log
VERSION = re.compile(r"API server version v?([\w.+]+)|LLM engine \(v?([\w.+]+)\)")
CACHE = re.compile(r"KV cache size: (\d[\d,]{0,20}) tokens")


class Server:
    """A server that `client` is connected to. Times are in seconds since `start_ns`."""

    def __init__(self, url: str, client: openai.AsyncOpenAI, seed: int) -> None:
        self.url, self.client, self.model = url, client, ""
        self.start_ns, self.tokens = time.perf_counter_ns(), 0  # of all requests, those that fail included
        self._rng = np.random.default_rng(seed)

    @property
    def now_s(self) -> float:
        return (time.perf_counter_ns() - self.start_ns) / 1e9

    async def get(self, path: str) -> str:
        """Return the body at `path`; "" if the server has none. Raises ScenarioError if it cannot be read."""
        try:
            return await self.client.get(f"{self.url}{path}", cast_to=str)
        except openai.APIStatusError as error:
            if error.status_code in (401, 403):
                hint = "CBSIM_API_KEY or --api-key-file has the key"
                raise ScenarioError(f"{self.url}: {_reason(error)}; {hint}") from None
            return ""
        except openai.APIConnectionError as error:
            raise ScenarioError(f"{self.url}: cannot be reached: {_reason(error)}") from None

    async def facts(self, model: str, log: Path | None) -> Facts:
        """Return what server and `log` report; choose the model. Raises ScenarioError."""
        listed, exposed = self._listed(await self.get("/v1/models"), model), await self.get("/metrics")
        names = [listed.get("owned_by"), *(each[0] for each in METRIC.findall(exposed)[:1])]
        engine = next((name for name in names if name in ENGINES), None)
        version = _object(await self.get("/version"))
        return _merged(  # the last source of a fact counts
            {
                str(log): {} if log is None else _logged(log),
                "/version": {"version": version.get("version")},
                "/metrics": _cache_config(exposed),
                "/v1/models": {"engine": engine, "model": self.model, "max_model_len": listed.get("max_model_len")},
            }
        )

    def _listed(self, body: str, model: str) -> Mapping[str, Any]:
        """Choose the model of that name, or the only one; return what the server lists of it. Raises ScenarioError."""
        data = _object(body).get("data")
        entries = data if isinstance(data, list) else []
        listed = {str(each.get("id")): each for each in entries if isinstance(each, dict)}
        if not listed and not model:
            expected = "expected the address of an OpenAI-compatible server, such as http://127.0.0.1:8000"
            raise ScenarioError(f"{self.url}: /v1/models lists no model; {expected}")
        self.model = model or next(iter(listed))
        if listed and (self.model not in listed or (not model and len(listed) > 1)):
            hint = near(model, listed) if model else ""
            raise ScenarioError(f"--model: got {model or 'none'}, must be one of {', '.join(listed)}{hint}")
        return listed.get(self.model, {})

    async def reading(self) -> dict[str, float]:
        """Return a reading of /metrics: by name, without the engine's prefix, the sum over its labels."""
        values = {"s": self.now_s}
        for _, name, _, number in METRIC.findall(await self.get("/metrics")):
            if not name.endswith(("_bucket", "_created", "_info")):
                values[name] = values.get(name, 0.0) + float(number)
        return values

    async def check(self) -> None:
        """Raise ScenarioError unless the server takes token ids, streams answers and reports their lengths."""
        probe = await self.send(self.prompt(PROBE[0]), PROBE[1])
        reason = probe.failed
        if not reason and probe.output_tokens > 1 and probe.ttft_s == probe.e2e_s:
            reason = f"does not stream: {probe.output_tokens} tokens came at once"
        if not reason and not probe.output_tokens > 0:
            reason = "reports no usage, so that lengths are not known"
        if reason:
            raise ScenarioError(f"{self.url}: {reason}")

    def prompt(self, tokens: int) -> list[int]:
        """Return random ids; no two prompts have a block in common."""
        ids: list[int] = self._rng.integers(*IDS, tokens).tolist()
        return ids

    async def send(self, prompt: Sequence[int], tokens: int) -> Measured:
        """Return what becomes of a completion of that many tokens; nothing is raised but a cancellation.

        Bytes are stamped as they come, and read later. The prompt bypasses the client, which would look at each id.
        """
        fields: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        fields |= {"extra_body": {"prompt": prompt, "ignore_eos": True}}
        parts: list[tuple[int, bytes]] = []
        self.tokens += len(prompt) + tokens
        failed, start = "", time.perf_counter_ns()
        try:
            create = self.client.completions.with_streaming_response.create
            async with create(model=self.model, prompt="", max_tokens=tokens, **fields) as response:
                async for part in response.iter_bytes():
                    parts.append((time.perf_counter_ns(), part))  # noqa: PERF401 - those before a failure count
        except Exception as error:  # those of the HTTP library, too, which has several names
            failed = _reason(error)
        times, usage, ended = _events(parts)
        details = _object(usage.get("prompt_tokens_details"))
        counts = usage.get("prompt_tokens", len(prompt)), usage.get("completion_tokens"), details.get("cached_tokens")
        prompt_tokens, output_tokens, cached = (each if isinstance(each, int) else math.nan for each in counts)
        first_s, last_s = ((times[at] - start) / 1e9 if times else math.nan for at in (0, -1))
        known: Any = {"start_s": (start - self.start_ns) / 1e9, "ttft_s": first_s, "e2e_s": last_s}
        known |= {"gaps_s": (np.diff(times) / 1e9).tolist(), "cached_tokens": cached, "failed": failed or ended}
        return Measured(prompt_tokens=prompt_tokens, output_tokens=output_tokens, **known)


def _events(parts: Iterable[tuple[int, bytes]]) -> tuple[Sequence[int], Mapping[str, Any], str]:
    """Return the times of the events with a choice, whose text may be empty (the first bytes of a letter), the usage,
    and why the answer is not complete, "" if it is.
    """
    times, finish, rest = list[int](), None, b""
    usage: Mapping[str, Any] = {}
    for now, part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            event = _object(line[5:]) if line.startswith(b"data:") else {}
            if "error" in event:
                return times, usage, cut(f"an error in the stream: {event['error']}")
            usage = _object(event.get("usage")) or usage
            if isinstance(choices := event.get("choices"), list) and choices:
                times.append(now)
                finish = _object(choices[0]).get("finish_reason") or finish
    return times, usage, "" if finish else "the answer ended early" if times else "does not stream: no event came"


def connected(url: str, key: str) -> openai.AsyncOpenAI:
    """Return a client of the server at this address alone."""
    direct = {"http://": None, "https://": None}  # whatever proxy the environment names
    http = openai.DefaultAsyncHttpxClient(follow_redirects=False, mounts=direct, timeout=PATIENCE_S)
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=PATIENCE_S, http_client=http)


def _reason(error: BaseException) -> str:
    """Return an error in a line; that of a server as its status and message."""
    if not isinstance(error, openai.APIStatusError):
        return cut(in_line(error.__cause__ or error))
    message = error.body.get("message", error.body) if isinstance(error.body, dict) else error.body
    return cut(f"{error.status_code}: {' '.join(str(message or error.response.reason_phrase).split())}")


def _merged(sources: Mapping[str, Mapping[str, Any]]) -> Facts:
    """Return what is known of several sources, of which the last one counts; a fact that cannot be one, such as a size
    of -1, which stands for automatic, is left out.
    """
    facts, flags, origins = dict[str, Any](), dict[str, Any](), dict[str, str]()
    for source, values in sources.items():
        for reported, value in values.items():
            name = FACTS.get(reported, reported)
            known = name in Facts.model_fields
            if isinstance(value, str | int | float) and (not known or _fits(name, value)):
                (facts if known else flags)[name] = value
                origins[name if known else f"flags.{name}"] = source
    tokens = flags.get(CACHE_TOKENS)
    if "num_blocks" not in facts and tokens is not None and _fits("num_blocks", tokens):
        size = facts.setdefault("block_size", ENGINES.get(facts.get("engine", ""), 16))
        origins.setdefault("block_size", "assumed, the engine's default")
        facts["num_blocks"], origins["num_blocks"] = max(tokens // size, 1), origins[f"flags.{CACHE_TOKENS}"]
    return Facts(**facts, flags=flags, sources=origins)


def _fits(fact: str, value: Any) -> bool:
    try:
        return bool(Facts.model_validate({fact: value}))
    except ValidationError:
        return False


def _object(body: Any) -> Mapping[str, Any]:
    """Return the object that JSON is, or a value; {} if it is none."""
    try:
        value = json.loads(body) if isinstance(body, str | bytes) else body
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _flags(pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Return flags, their values as Python writes them; what is none is a text."""
    flags: dict[str, Any] = {}
    for name, value in pairs:
        try:
            flags[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            flags[name] = value
    return flags


def _cache_config(exposed: str) -> dict[str, Any]:
    """Return what /metrics has of the cache: vLLM as labels, SGLang as labels or as a number."""
    flags: dict[str, Any] = {}
    for _, name, labels, number in METRIC.findall(exposed):
        if name == "cache_config_info":
            flags |= _flags((key, value) for key, value in LABEL.findall(labels) if key not in ("engine", "model_name"))
        elif name == CACHE_TOKENS:
            flags[name] = int(float(number))
    return flags


def _logged(log: Path) -> dict[str, Any]:
    """Return flags, version and the size of the cache that the log of a server's start has. Raises ScenarioError."""
    content = read_text(log, most_bytes=100_000_000)
    starts = {line[line.index(start) :] for start in STARTS for line in content.splitlines() if start in line}
    if any(sum(line.startswith(start) for line in starts) > 1 for start in STARTS):
        raise ScenarioError(f"{log}: holds the start of several servers, expected one")
    flags = _flags(pair for line in starts for pair in FLAG.findall(line))
    if version := VERSION.search(content):
        flags["version"] = version[1] or version[2]
    if cache := CACHE.search(content):
        flags[CACHE_TOKENS] = int(cache[1].replace(",", ""))
    if not flags:
        known = ", ".join(repr(start.strip(" =:")) for start in STARTS)
        reason = f"has no line of vLLM's or SGLang's start ({known})"
        raise ScenarioError(f"{log}: {reason}; without --log flags are assumed")
    return flags
