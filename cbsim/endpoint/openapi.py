"""The OpenAPI document, from the models of requests."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from cbsim.endpoint.asking import Asked, ChatAsked, CompletionAsked, DetokenizeAsked, TokenizeAsked

_REF = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "integer"},
            },
        }
    },
}
_POSTS: dict[str, tuple[type[Asked], str, tuple[int, ...]]] = {
    "/v1/chat/completions": (ChatAsked, "Goes on with a conversation", (400, 401, 404, 413, 415, 500, 503)),
    "/v1/completions": (CompletionAsked, "Goes on with texts", (400, 401, 404, 413, 415, 500, 503)),
    "/tokenize": (TokenizeAsked, "Token ids of a text or conversation", (400, 401, 404, 413, 415)),
    "/detokenize": (DetokenizeAsked, "The text of token ids", (400, 401, 404, 413, 415)),
}
_GETS = {
    "/v1/models": ("The model that is served", "application/json", (401,)),
    "/health": ("Whether it can serve: 200, else 503", None, (503,)),
    "/ping": ("As /health", None, (503,)),
    "/version": ("The version of cbsim", "application/json", (401,)),
    "/metrics": ("Prometheus text under vLLM's names", "text/plain", (401, 404)),
    "/load": ("Requests under way", "application/json", (401,)),
}


def _errors(statuses: tuple[int, ...]) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}
    return {str(status): {"description": "an error", "content": content} for status in statuses}


def openapi(version: str) -> dict[str, Any]:
    models = [model for model, _, _ in _POSTS.values()]
    _, schemas = models_json_schema([(model, "validation") for model in models], ref_template=_REF)
    paths: dict[str, Any] = {
        path: {
            "post": {
                "summary": words,
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": {"$ref": _REF.format(model=model.__name__)}}},
                },
                "responses": {"200": {"description": "its answer"}, **_errors(statuses)},
            }
        }
        for path, (model, words, statuses) in _POSTS.items()
    }
    for path, (words, kind, statuses) in _GETS.items():
        done: dict[str, Any] = {"description": words, **({"content": {kind: {}}} if kind else {})}
        errors = {"503": {"description": "it cannot"}} if kind is None else _errors(statuses)
        paths[path] = {"get": {"summary": words, "responses": {"200": done, **errors}}}
    done = {"200": {"description": "forgotten"}, **_errors((401,))}
    paths["/reset_prefix_cache"] = {"post": {"summary": "No KV of before is found again", "responses": done}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "cbsim", "version": version},
        "paths": paths,
        "components": {
            "schemas": {**schemas["$defs"], "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }
