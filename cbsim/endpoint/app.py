"""An ASGI application in front of a server: the routes of vLLM's, and its errors."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from cbsim.endpoint.asking import DetokenizeAsked, TokenizeAsked, read
from cbsim.endpoint.backend import UNMETERED, Backend, Meter
from cbsim.endpoint.body import GoneError, read_json, refuse
from cbsim.endpoint.desk import Desk
from cbsim.endpoint.errors import Refusal
from cbsim.endpoint.generating import Generating
from cbsim.endpoint.keys import may_pass
from cbsim.endpoint.openapi import openapi
from cbsim.endpoint.prompting import Encoder, known, model_is
from cbsim.endpoint.settings import Settings

LOG = logging.getLogger("cbsim.endpoint")
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Exposition = Callable[[], bytes]


def build(
    backend: Backend, settings: Settings | None = None, meter: Meter = UNMETERED, exposition: Exposition | None = None
) -> App:
    """`meter` is set in the backend. /metrics says what `exposition` does, or the meter's own method of that name."""
    backend.meter = meter
    return App(backend, settings or Settings(), exposition or getattr(meter, "exposition", None))


class App:
    """The application. `desk` has what is under way."""

    def __init__(self, backend: Backend, settings: Settings, exposition: Exposition | None) -> None:
        self.backend, self.settings = backend, settings
        self.desk = Desk(backend, settings)
        self._exposition = exposition
        self._encoder = Encoder(backend.tokenizer, settings.inline_characters)
        self._created = int(time.time())
        self._openapi: dict[str, Any] | None = None
        self._router = Router(
            [
                Route("/v1/chat/completions", Generating(self.desk, self._encoder, chat=True), methods=["POST"]),
                Route("/v1/completions", Generating(self.desk, self._encoder, chat=False), methods=["POST"]),
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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await _lifespan(receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1000})
        scope["app"] = self  # so that the router raises what it does not know
        try:
            if not may_pass(self.settings.keys, scope["path"], scope["headers"]):
                raise Refusal(401, "an API key is needed: `Authorization: Bearer KEY`")
            await self._router(scope, receive, send)
        except GoneError:
            pass
        except asyncio.CancelledError:
            if not self.desk.closing:  # else the session ends, and the connection is gone
                raise
        except Refusal as refusal:
            await refuse(send, refusal)
        except HTTPException as error:
            headers = [(key.lower().encode(), value.encode()) for key, value in (error.headers or {}).items()]
            await refuse(send, Refusal(error.status_code, error.detail), headers)
        except Exception:
            LOG.exception("%s %s failed", scope["method"], scope["path"])
            await refuse(send, Refusal(500, "Internal Server Error"))

    @property
    def healthy(self) -> bool:
        return self.backend.dead is None and not self.desk.closing

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
        return Response(status_code=200 if self.healthy else 503)

    async def _version(self, _: Request) -> Response:
        return JSONResponse({"version": _installed()})

    async def _metrics(self, _: Request) -> Response:
        if self._exposition is None:
            raise HTTPException(404)
        return Response(self._exposition(), media_type=METRICS_TYPE)

    async def _load(self, _: Request) -> Response:
        return JSONResponse({"server_load": self.desk.open})

    async def _tokenize(self, request: Request) -> Response:
        asked = read(TokenizeAsked, await self._body(request))
        model_is(asked.model, self.backend)
        if (asked.prompt is None) == (asked.messages is None):
            raise Refusal(400, "either `prompt` or `messages` has to be there", "prompt")
        text, messages = asked.prompt, asked.messages
        ids = await (self._encoder.text(text) if text is not None else self._encoder.chat(messages or []))
        counts = {"count": len(ids), "max_model_len": self.backend.max_model_len}
        strings = await self._encoder.strings(ids) if asked.return_token_strs else None
        return JSONResponse({**counts, "tokens": ids, "token_strs": strings})

    async def _detokenize(self, request: Request) -> Response:
        asked = read(DetokenizeAsked, await self._body(request))
        model_is(asked.model, self.backend)
        return JSONResponse({"prompt": self.backend.tokenizer.decode(known(asked.tokens, self._encoder, "tokens"))})

    async def _forget(self, _: Request) -> Response:
        self.backend.forget_prefixes()
        return Response()

    async def _document(self, _: Request) -> Response:
        self._openapi = self._openapi or openapi(_installed())
        return JSONResponse(self._openapi)

    async def _body(self, request: Request) -> bytes:
        return await read_json(request.scope, request.receive, self.settings.max_body_bytes)


def _installed() -> str:
    try:
        return version("cbsim")
    except PackageNotFoundError:  # run from its sources
        return "0"


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
