"""What an OpenAI-compatible endpoint promises: paths, fields, errors, as vLLM 0.33 has them."""

from __future__ import annotations

import asyncio
import json
from hashlib import sha256
from typing import Any

import pytest
from support.endpoint_calls import JSON, Instant, answer_to, call, chat, chat_ids, completion, embedded, saying, text_of
from support.scripted import Scripted

from cbsim.http.app import App
from cbsim.http.backend import Meter, Stream
from cbsim.http.requests import NEUTRAL
from cbsim.http.settings import Settings

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def test_a_completion_has_16_tokens_by_default() -> None:
    answer = completion().json
    (choice,) = answer["choices"]
    assert answer["object"] == "text_completion" and answer["id"] == "cmpl-0" and answer["model"] == "scripted"
    assert choice == {
        "index": 0,
        "text": embedded().decode(range(300, 316)),
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    assert answer["usage"] == {
        "prompt_tokens": len(embedded().encode("a b c")),
        "completion_tokens": 16,
        "total_tokens": len(embedded().encode("a b c")) + 16,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_a_chat_goes_on_until_the_model_ends() -> None:
    answer = chat(saying("Good morning, Ångström 👣!")).json
    (choice,) = answer["choices"]
    assert answer["object"] == "chat.completion" and answer["id"] == "chatcmpl-0"
    assert choice["message"] == {"role": "assistant", "content": "Good morning, Ångström 👣!"}
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["prompt_tokens"] == len(chat_ids([{"role": "user", "content": "a b c"}]))


def test_max_completion_tokens_wins() -> None:
    assert chat(max_completion_tokens=3, max_tokens=9).json["usage"]["completion_tokens"] == 3


async def test_a_chat_may_fill_the_context() -> None:
    backend = Instant(max_model_len=40)
    body = {"messages": [{"role": "user", "content": "a"}]}
    answer, prompt = await call(App(backend), CHAT, body), len(backend.generations[0].prompt)
    assert answer.json["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 40 - prompt,
        "total_tokens": 40,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("prompt", "choices"), [("a", 1), ([5, 6], 1), (["a", "b c"], 2), ([[5], [6, 7], [8]], 3)])
def test_each_prompt_is_a_choice(prompt: Any, choices: int, stream: bool) -> None:
    answer = completion(prompt=prompt, max_tokens=4, stream=stream)
    emitted = answer.events if stream else [answer.json]
    assert {choice["index"] for chunk in emitted for choice in chunk["choices"]} == {*range(choices)}
    assert all(text_of(emitted, index) == embedded().decode(range(300, 304)) for index in range(choices))


def test_a_stream_has_a_chunk_a_token() -> None:
    answer = chat(stream=True, max_tokens=5)
    role, *chunks = answer.events
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 4 + ["length"]
    assert text_of(chunks) == embedded().decode(range(300, 305))
    assert {chunk["object"] for chunk in answer.events} == {"chat.completion.chunk"}
    assert not any("usage" in chunk for chunk in answer.events)


def test_usage_is_the_last_chunk_on_request() -> None:
    *chunks, last = completion(stream=True, max_tokens=5, stream_options={"include_usage": True}).events
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 5
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert not any("usage" in chunk for chunk in chunks)


def test_continuous_usage_counts_every_chunk() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = chat(stream=True, max_tokens=5, stream_options=options).events
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 2, 3, 4, 5, 5]


@pytest.mark.parametrize("stream", [False, True])
def test_times_of_a_request_are_sent_on_request(stream: bool) -> None:
    answer = completion(stream=stream, include_metrics=True)
    metrics = (answer.events[-1] if stream else answer.json)["metrics"]
    fields = {"time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"}
    assert set(metrics) == fields and all(value >= 0 for value in metrics.values())
    several = completion(prompt=["a", "b"], include_metrics=True)
    assert several.json["metrics"] is None  # whose would they be?


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text(stream: bool) -> None:
    answer = completion(saying("one, two, three, four"), stream=stream, stop=["ree", "three, f"], max_tokens=99)
    emitted = answer.events if stream else [answer.json]
    assert text_of(emitted) == "one, two, th"
    last = emitted[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "ree")
    whole = completion(saying("one, two, three, four"), stop="ree", include_stop_str_in_output=True, max_tokens=99)
    assert text_of([whole.json]) == "one, two, three"


async def test_a_stop_string_cancels_what_the_server_still_does() -> None:
    class Stepping(Instant):
        def _steps(self, stream: Stream) -> None:
            if stream.finish is None:
                self.step(self.now_s)
                asyncio.get_running_loop().call_later(0, self._steps, stream)

    backend = Stepping(saying("one two three"))
    answer = await call(App(backend), COMPLETIONS, {"prompt": "x", "stop": " two"})
    assert text_of([answer.json]) == "one" and answer.json["choices"][0]["finish_reason"] == "stop"
    assert backend.cancelled == ["cmpl-0"] and not backend.load.running


@pytest.mark.parametrize("field", sorted(NEUTRAL))
def test_what_is_not_supported_is_refused_by_name(field: str) -> None:
    answer = completion(**{field: {"surely": "not neutral"}})
    assert answer.status == 400 and answer.error["param"] == field and f"`{field}`" in answer.error["message"]
    for neutral in (None, *NEUTRAL[field]):
        assert completion(**{field: neutral}).status == 200
        assert json.dumps(neutral) in answer.error["message"]


def test_what_would_ask_for_nothing_is_named() -> None:
    """1.0 is 1 in JSON, true is not."""
    message = "`n` is not supported by this server, other than as null or 1"
    assert [completion(n=n).error["message"] for n in (0, 2, True)] == [message] * 3
    assert completion(n=1.0, presence_penalty=0.0).status == 200
    message = completion(response_format={"type": "json_object"}).error["message"]
    assert message.endswith('other than as null or {"type": "text"}')


def test_unknown_fields_and_nulls_are_taken() -> None:
    nulls = dict.fromkeys(["model", "max_tokens", "stop", "stream", "stream_options", "seed", "temperature", "top_p"])
    assert completion(**nulls, wholly_unknown={"a": [1]}, user="u").status == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "7"}, "max_tokens"),
        ({"max_tokens": 2**40}, "max_tokens"),
        ({"max_tokens": 1 << 21}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "é" * 257}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"seed": 2**64}, "seed"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [4096]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"request_id": "two words"}, "request_id"),
    ],
)
def test_values_out_of_bounds_name_their_field(fields: dict[str, Any], param: str) -> None:
    answer = completion(**fields)
    assert answer.status == 400 and answer.error["param"] == param and answer.error["type"] == "BadRequestError"


@pytest.mark.parametrize(("within", "beyond"), [(2**63 - 1, 2**63), (-(2**63), -(2**63) - 1)])
def test_the_bound_of_a_seed_is_exact(within: int, beyond: int) -> None:
    assert completion(seed=within).status == 200
    assert completion(seed=beyond).error["message"].endswith(f" {within}")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "nobody", "content": "x"}], "messages.0.role"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages.0.content"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages.0.content"),
        ([{"role": "user", "content": ["x"]}], "messages.0.content"),
        ([{"role": "user"}, {"role": "user", "content": 5}], "messages.1.content"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages.0.tool_calls"),
        ("hello", "messages"),
    ],
)
def test_messages_that_cannot_be_used_name_their_field(messages: Any, param: str) -> None:
    answer = chat(messages=messages)
    assert answer.status == 400 and answer.error["param"] == param
    assert not param.endswith("content") or "only text is supported" in answer.error["message"]


async def test_a_prompt_that_fills_the_context_is_refused() -> None:
    assert (await call(App(Instant(max_model_len=3)), COMPLETIONS, {"prompt": [1, 2, 3]})).error["param"] == "prompt"


async def test_text_parts_of_a_message_are_lines() -> None:
    backend = Instant()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await call(App(backend), CHAT, {"messages": [{"role": "user", "content": parts}], "max_tokens": 1})
    assert backend.generations[0].prompt == chat_ids([{"role": "user", "content": "a\nb"}])


@pytest.mark.parametrize(
    ("body", "part"),
    [(b"", "JSON"), (b"{", "JSON"), (b"[]", "object"), (b'{"prompt":' + b"[" * 9999, "JSON"), (b"\xff", "JSON")],
)
def test_a_body_that_is_no_object_is_refused(body: bytes, part: str) -> None:
    answer = answer_to(COMPLETIONS, body)
    assert answer.status == 400 and part in answer.error["message"]


def test_other_models_and_paths_are_not_found() -> None:
    answer = completion(model="other")
    assert answer.status == 404 and answer.error["param"] == "model" and answer.error["type"] == "NotFoundError"
    assert answer_to("/v1/nowhere").error["code"] == 404
    assert answer_to("/v1/models/other").error["code"] == 404


def test_other_methods_are_not_allowed() -> None:
    answer = answer_to(COMPLETIONS, method="GET")
    assert answer.status == 405 and answer.headers["allow"] == "POST" and answer.error
    assert answer_to("/health", method="DELETE").status == 405


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([], 415),
        ([("content-type", "text/plain")], 415),
        ([("content-type", "Application/JSON; charset=x")], 200),
        ([JSON, ("content-encoding", "gzip")], 415),
        ([JSON, ("content-encoding", "identity, br")], 415),
        ([JSON, ("content-encoding", "Identity")], 200),
    ],
)
def test_only_plain_json_is_taken(headers: list[tuple[str, str]], status: int) -> None:
    answer = answer_to(COMPLETIONS, {"prompt": "a"}, headers=headers)
    assert answer.status == status
    assert status == 200 or ("Content-Encoding" if len(headers) > 1 else "application/json") in answer.error["message"]


def test_a_body_that_is_too_long_is_refused_whatever_it_says() -> None:
    settings = Settings(max_body_bytes=50)
    body = {"prompt": "a" * 50}
    assert answer_to(COMPLETIONS, body, settings=settings).status == 413
    assert answer_to(COMPLETIONS, body, settings=settings, headers=[JSON, ("content-length", "9")]).status == 413
    assert answer_to(COMPLETIONS, b"{}", settings=settings, headers=[JSON, ("content-length", "51")]).status == 413
    assert answer_to(COMPLETIONS, {"prompt": "a" * 9}, settings=settings).status == 200


def test_only_a_bearer_of_a_key_may_pass() -> None:
    settings = Settings(keys=(sha256(b"first").digest(), sha256(b"second").digest()))
    for path in ("/v1/models", "/metrics", "/version", "/load", "/nowhere", "/openapi.json"):
        answer = answer_to(path, None, settings=settings)
        assert answer.status == 401 and answer.error["type"] == "AuthenticationError"
        assert answer.headers["www-authenticate"] == "Bearer"
    for wrong in ("Bearer third", "Basic first", "first", "Bearer", "Bearer firstfirst"):
        assert answer_to("/v1/models", None, settings=settings, headers=[("authorization", wrong)]).status == 401
    for right in ("Bearer first", "bearer second"):
        assert answer_to("/v1/models", None, settings=settings, headers=[("authorization", right)]).status == 200
    assert answer_to("/health", None, settings=settings).status == 200


async def test_a_request_keeps_its_name() -> None:
    backend = Instant()
    app = App(backend)
    headers = [JSON, ("X-Request-Id", "mine")]
    body = {"prompt": ["a", "b"], "max_tokens": 1}
    answers = [await call(app, COMPLETIONS, body, headers=headers) for _ in range(2)]
    answers.append(await call(app, COMPLETIONS, {**body, "request_id": "0"}))
    assert [answer.json["id"] for answer in answers] == ["cmpl-mine", "cmpl-mine", "cmpl-0"]
    assert [answer.headers["x-request-id"] for answer in answers] == ["mine", "mine", "0"]
    ids = [generation.id for generation in backend.generations]
    assert len({*ids}) == len(ids) == 6  # two clients with one name are two requests
    for name in ("", "a" * 129, "a b", "é"):
        wrong = await call(app, COMPLETIONS, {"prompt": "a"}, headers=[JSON, ("x-request-id", name)])
        assert wrong.error["param"] == "X-Request-Id"


def test_the_other_paths() -> None:
    (card,) = answer_to("/v1/models").json["data"]
    assert card["id"] == "scripted" and card["max_model_len"] == 1 << 20
    assert answer_to("/v1/models/scripted").json == card
    assert answer_to("/health").status == 200 and answer_to("/health").body == b""
    assert answer_to("/ping", method="POST").status == 200
    assert answer_to("/load").json == {"server_load": 0}
    assert set(answer_to("/version").json) == {"version"}
    assert answer_to("/metrics").status == 404  # nobody counts
    tokens = answer_to("/tokenize", {"prompt": "Hello, Ångström"}).json
    assert tokens["tokens"] == embedded().encode("Hello, Ångström") and tokens["count"] == len(tokens["tokens"])
    assert answer_to("/detokenize", {"tokens": tokens["tokens"]}).json == {"prompt": "Hello, Ångström"}
    conversation = [{"role": "user", "content": "x"}]
    assert answer_to("/tokenize", {"messages": conversation}).json["tokens"] == chat_ids(conversation)
    assert answer_to("/tokenize", {}).status == 400


async def test_tokens_after_the_end_are_not_told() -> None:
    """A step that was in flight when its request was cancelled may yield one more."""

    class Overlapping(Instant):
        def _steps(self, stream: Stream) -> None:
            stream.put([300], 0.0)
            self.cancel(stream)
            stream.put([301], 0.0)

    app = App(Overlapping())
    answer = await call(app, COMPLETIONS, {"prompt": "x", "stream": True})
    assert answer.events[-1]["error"]["code"] == 503 and app.admission.unread == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_is_kept_of_a_text_that_a_stop_string_ended(stream: bool) -> None:
    """The server has put all of it by then, far more than is taken at once."""
    app = App(Instant())
    await call(
        app, COMPLETIONS, {"prompt": "x", "stop": embedded().decode([301]), "max_tokens": 3000, "stream": stream}
    )
    assert not app.admission.unread and not app.admission.streams and not app.admission.open


async def test_prefixes_are_forgotten() -> None:
    backend = Instant()
    assert (await call(App(backend), "/reset_prefix_cache", method="POST")).status == 200
    assert backend.forgotten == 1


@pytest.mark.parametrize(
    ("settings", "part", "reason"),
    [
        (Settings(max_streams=1), "under way", "streams"),
        (Settings(max_queued_requests=1), "wait", "queued_requests"),
        (Settings(max_queued_tokens=3), "tokens of prompts", "queued_tokens"),
    ],
)
async def test_requests_beyond_a_limit_are_told_to_come_back(settings: Settings, part: str, reason: str) -> None:
    class Turned(Meter):
        def rejected(self, reason: str) -> None:
            reasons.append(reason)

    reasons: list[str] = []
    answer = await call(App(Instant(), settings, Turned()), COMPLETIONS, {"prompt": [[1, 2], [3, 4]]})
    assert answer.status == 503 and answer.headers["retry-after"] == "1" and part in answer.error["message"]
    assert reasons == [reason]


async def test_a_dead_server_says_so() -> None:
    backend = Instant()
    app = App(backend)
    backend.dead = "no memory left"
    health, answer = await call(app, "/health"), await call(app, COMPLETIONS, {"prompt": "a"})
    assert health.status == 503 and answer.status == 503 and "no memory left" in answer.error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_of_the_server_reaches_the_client(stream: bool) -> None:
    class Failing(Instant):
        def step(self, at_s: float) -> None:
            if any(stream.tokens == 2 for stream in self._running):
                self.die("it broke")
            else:
                super().step(at_s)

    answer = await call(App(Failing()), COMPLETIONS, {"prompt": "a", "stream": stream})
    assert answer.status == (200 if stream else 500)
    error = answer.events[-1]["error"] if stream else answer.error
    assert error["message"] == "it broke" and error["code"] == 500


def test_the_document_describes_every_path() -> None:
    document = answer_to("/openapi.json").json
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics"} <= set(document["paths"])
    names = {part.split('"')[0] for part in json.dumps(document).split("#/components/schemas/")[1:]}
    assert {"Error", "ChatRequest"} <= names <= set(document["components"]["schemas"])


def test_a_request_that_fails_at_once_leaves_nothing_behind() -> None:
    """If the server fails one prompt of a request at once, the answer is 400 and the other prompts are cancelled."""

    class Failing(Scripted):
        def submit(self, stream: Stream) -> None:
            super().submit(stream)
            if len(self.generations) == 2:
                del self._running[stream]
                stream.end("error", self.now_s, "does not fit")

    backend = Failing(embedded(), 0.0)
    app = App(backend)
    answer = asyncio.run(call(app, "/v1/completions", {"prompt": ["a", "b", "c"]}))
    assert (answer.status, answer.error["message"]) == (400, "does not fit")
    assert len(backend.cancelled) == 2
    assert not app.admission.streams and not app.admission.open and not backend.load.running
