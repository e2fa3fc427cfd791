"""The OpenAPI 3.1 document, its schemas taken from the request structures themselves."""

from __future__ import annotations

from typing import Any

import msgspec

from lumenbox.api.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
POSTS: dict[str, tuple[str, type[msgspec.Struct]]] = {
    "/v1/chat/completions": ("Answer a conversation; server-sent events with stream: true", ChatBody),
    "/v1/completions": ("Continue one or more prompts; server-sent events with stream: true", CompletionBody),
    "/tokenize": ("Text or conversation to token ids", TokenizeBody),
    "/detokenize": ("Token ids to text", DetokenizeBody),
}
GETS = {
    "/v1/models": "The served model",
    "/v1/models/{id}": "The served model, by its id",
    "/health": "200 while a worker serves and the box is not draining, else 503",
    "/live": "200 while the coordinator runs",
    "/ready": "200 while a worker is ready and intake is open, else 503",
    "/metrics": "Prometheus metrics",
    "/version": "The version of lumenbox",
    "/openapi.json": "This document",
    "/lumenbox/state": "The box's state, as `lumenbox status --json` prints it",
}
OPEN = ("/health", "/live", "/ready")
"""Routes that answer without a key."""


def document(version: str) -> dict[str, Any]:
    """The whole document."""
    kinds = [kind for _, kind in POSTS.values()]
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {path: {"get": get(path, text)} for path, text in GETS.items()}
    for (path, (text, _)), schema in zip(POSTS.items(), schemas, strict=True):
        paths[path] = {"post": post(text, schema)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "lumenbox", "version": version},
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def get(path: str, text: str) -> dict[str, Any]:
    """One GET operation."""
    operation: dict[str, Any] = {"summary": text, "responses": {"200": {"description": "ok"}}}
    if "{id}" in path:
        operation["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation if path in OPEN else operation | {"security": [{"key": []}, {}]}


def post(text: str, schema: dict[str, Any]) -> dict[str, Any]:
    """One POST operation."""
    refusal = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        "summary": text,
        "security": [{"key": []}, {}],
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {
            "200": {"description": "ok"},
            "4XX": {"description": "refused", "content": refusal},
            "5XX": {"description": "cannot be served now", "content": refusal},
        },
    }
