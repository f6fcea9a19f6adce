"""An ASGI application in front of a server: the routes of vLLM's server, its errors, and their OpenAPI document."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from cbsim.http import requests
from cbsim.http.admission import AdmissionController
from cbsim.http.asgi import GENERATIONS, ApiError, read_json, send_error
from cbsim.http.backend import UNMETERED, Backend, Meter
from cbsim.http.generating import Generating
from cbsim.http.requests import Encoder, RequestBody, model_is, read
from cbsim.http.settings import Settings, may_pass

LOG = logging.getLogger("cbsim.http")


class Endpoint(ABC):
    """An ASGI application behind a port. `run` ends once it is closed and all answers have ended, or returns why it
    cannot go on.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings, self.closing = settings, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.answer(scope, receive, send)
        try:
            if not may_pass(self.settings.keys, scope["path"], scope["headers"]):
                raise ApiError(401, "an API key is needed: `Authorization: Bearer KEY`")
            await self.answer(scope, receive, send)
        except ClientDisconnect:
            pass
        except asyncio.CancelledError:
            if not self.closing:  # else the session ends, and the connection is gone
                raise
        except ApiError as error:
            await send_error(send, error)
        except HTTPException as error:
            headers = [(key.lower().encode(), value.encode()) for key, value in (error.headers or {}).items()]
            await send_error(send, ApiError(error.status_code, error.detail), headers)
        except Exception:
            LOG.exception("%s %s failed", scope["method"], scope["path"])
            await send_error(send, ApiError(500, "Internal Server Error"))

    @abstractmethod
    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. Raises ApiError."""

    @abstractmethod
    async def run(self) -> str | None: ...

    def close(self) -> None:
        """Take nothing more in."""
        self.closing = True

    @abstractmethod
    def cut(self) -> int:
        """Cancel the answers under way, and return their number."""


class App(Endpoint):
    """The application of a server; `admission` has the requests in progress. It sets the server's meter."""

    def __init__(self, backend: Backend, settings: Settings | None = None, meter: Meter = UNMETERED) -> None:
        super().__init__(settings or Settings())
        backend.meter = meter
        self.backend = backend
        self.admission = AdmissionController(backend, self.settings)
        self._encoder = Encoder(backend.tokenizer, self.settings.inline_characters)
        self._created = int(time.time())
        self._openapi: dict[str, Any] | None = None
        self._router = Router(
            [
                Route(GENERATIONS[0], Generating(self.admission, self._encoder, chat=True), methods=["POST"]),
                Route(GENERATIONS[1], Generating(self.admission, self._encoder, chat=False), methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/health", self._health),
                Route("/ping", self._health, methods=["GET", "POST"]),
                Route("/version", self._version),
                Route("/metrics", self._metrics),
                Route("/load", self._load),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/detokenize", self._detokenize, methods=["POST"]),
                Route("/reset_prefix_cache", self._forget, methods=["POST"]),
                Route("/openapi.json", self._document),
            ],
            redirect_slashes=False,
        )

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # makes the router raise an exception for an unknown path
        await self._router(scope, receive, send)

    async def run(self) -> str | None:
        await self.backend.run()
        return self.backend.dead

    def close(self) -> None:
        self.closing = self.admission.closing = True
        self.backend.close()

    def cut(self) -> int:
        count = self.admission.open
        self.admission.abandon([*self.admission.streams.values()])
        return count

    def _card(self) -> dict[str, Any]:
        backend = self.backend
        return {
            "id": backend.model,
            "object": "model",
            "created": self._created,
            "owned_by": "cbsim",
            "root": backend.model,
            "parent": None,
            "max_model_len": backend.max_model_len,
        }

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def _model(self, request: Request) -> Response:
        model_is(request.path_params["name"], self.backend)
        return JSONResponse(self._card())

    async def _health(self, _: Request) -> Response:
        healthy = self.backend.dead is None and not self.admission.closing
        return Response(status_code=200 if healthy else 503)

    async def _version(self, _: Request) -> Response:
        return JSONResponse({"version": _installed()})

    async def _metrics(self, _: Request) -> Response:
        if (exposition := self.backend.meter.exposition()) is None:
            raise HTTPException(404)
        return Response(exposition, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _load(self, _: Request) -> Response:
        return JSONResponse({"server_load": self.admission.open})

    async def _tokenize(self, request: Request) -> Response:
        body = read(requests.TokenizeRequest, await read_json(request, self.settings.max_body_bytes))
        model_is(body.model, self.backend)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "either `prompt` or `messages` has to be there", "prompt")
        encoder, prompt = self._encoder, body.prompt
        ids = await (encoder.chat(body.messages or []) if prompt is None else encoder.plain(prompt))
        counts = {"count": len(ids), "max_model_len": self.backend.max_model_len}
        strings = await encoder.strings(ids) if body.return_token_strs else None
        return JSONResponse({**counts, "tokens": ids, "token_strs": strings})

    async def _detokenize(self, request: Request) -> Response:
        body = read(requests.DetokenizeRequest, await read_json(request, self.settings.max_body_bytes))
        model_is(body.model, self.backend)
        ids = self._encoder.checked(body.tokens, "tokens") if body.tokens else []
        return JSONResponse({"prompt": await self._encoder.text(ids)})

    async def _forget(self, _: Request) -> Response:
        self.backend.forget_prefixes()
        return Response()

    async def _document(self, _: Request) -> Response:
        self._openapi = self._openapi or openapi(_installed())
        return JSONResponse(self._openapi)


def _installed() -> str:
    try:
        return version("cbsim")
    except PackageNotFoundError:  # cbsim runs from its sources
        return "0"


_REF = "#/components/schemas/{model}"


class Problem(BaseModel):
    """What is wrong, in which field of the request."""

    message: str
    type: str
    param: str | None = None
    code: int


class Error(BaseModel):
    """The body of an answer that is an error."""

    error: Problem


_BODY, _GENERATION = (400, 401, 404, 413, 415), (400, 401, 404, 413, 415, 500, 503)
_DOCUMENTED: dict[str, tuple[str, str, type[RequestBody] | None, str | None, tuple[int, ...]]] = {
    "/v1/chat/completions": ("post", "Answer a conversation", requests.ChatRequest, None, _GENERATION),
    "/v1/completions": ("post", "Continue prompts", requests.CompletionRequest, None, _GENERATION),
    "/tokenize": ("post", "Token ids of a prompt or conversation", requests.TokenizeRequest, None, _BODY),
    "/detokenize": ("post", "Decode token ids", requests.DetokenizeRequest, None, _BODY),
    "/reset_prefix_cache": ("post", "Forget every cached prefix", None, None, (401,)),
    "/v1/models": ("get", "The model that is served", None, "application/json", (401,)),
    "/health": ("get", "Whether it can serve: 200, else 503", None, None, (503,)),
    "/ping": ("get post", "The same as /health", None, None, (503,)),
    "/version": ("get", "The version of cbsim", None, "application/json", (401,)),
    "/metrics": ("get", "Prometheus text under vLLM's names", None, "text/plain", (401, 404)),
    "/load": ("get", "Requests in progress", None, "application/json", (401,)),
}
"""The methods, summary, body, type of the answer if documented, and statuses of errors of each route."""


def _content(model: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(model=model)}}}


def openapi(version: str) -> dict[str, Any]:
    models: list[type[BaseModel]] = [Error, *(body for _, _, body, _, _ in _DOCUMENTED.values() if body is not None)]
    _, schemas = models_json_schema([(model, "validation") for model in models], ref_template=_REF)
    paths: dict[str, Any] = {}
    for path, (methods, summary, body, kind, statuses) in _DOCUMENTED.items():
        done: dict[str, Any] = {"description": summary, **({"content": {kind: {}}} if kind else {})}
        error = {"description": "an error", **({} if statuses == (503,) else {"content": _content("Error")})}
        entry: dict[str, Any] = {
            "summary": summary,
            "responses": {"200": done, **{str(status): error for status in statuses}},
        }
        if body is not None:
            entry["requestBody"] = {"required": True, "content": _content(body.__name__)}
        paths[path] = dict.fromkeys(methods.split(), entry)
    return {
        "openapi": "3.1.0",
        "info": {"title": "cbsim", "version": version},
        "paths": paths,
        "components": {"schemas": schemas["$defs"], "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }
