"""The OpenAPI document of a server, generated from its routes, and an HTML page with the same
content.

Invariant: both contain every route of the server. `DETAILS` only adds descriptions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape
from importlib.metadata import version
from typing import Any

import orjson
from pydantic import BaseModel

from toolroll.rollout.server.dialects.anthropic_request import MessagesRequest
from toolroll.rollout.server.dialects.openai_responses_request import ResponsesRequest
from toolroll.rollout.server.requests.protocol import (
    ChatRequest,
    CompletionRequest,
    RewardRequest,
    SessionRequest,
    TokenizeRequest,
)

_ANY = re.compile(r"\{(\w+)(?::[^}]*)?\}")
_SESSION = "/sessions/{session}"
_REF = "#/components/schemas/{model}"
_ERROR: dict[str, Any] = {
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
                "code": {"type": "string"},
            },
        }
    },
}
_MESSAGES_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {"type": {"const": "error"}, **_ERROR["properties"]},
}


@dataclass(frozen=True, slots=True)
class Details:
    """What the OpenAPI document says about one route, in addition to its method and path."""

    summary: str
    body: type[BaseModel] | None = None
    success: int = 200
    media: str = "application/json"
    refusal: str = "Error"
    """The name of the schema of an error response."""


DETAILS: Mapping[tuple[str, str], Details] = {
    ("GET", "/health"): Details("The model, and the number of sessions. Needs no key."),
    ("GET", "/metrics"): Details("Counters in Prometheus' text format.", media="text/plain"),
    ("GET", "/openapi.json"): Details("This document."),
    ("GET", "/docs"): Details("This document as a page.", media="text/html"),
    ("GET", "/sessions"): Details("The live sessions, and with --out also the finished ones."),
    ("POST", "/sessions"): Details("Create a session.", SessionRequest, 201),
    ("GET", f"{_SESSION}/trajectories"): Details("The training sequences of the session."),
    ("GET", f"{_SESSION}/trace"): Details("Every answer in the order of delivery."),
    ("POST", f"{_SESSION}/reward"): Details("Store a reward with the session.", RewardRequest),
    ("POST", f"{_SESSION}/export"): Details("Finish the session: write it to episodes.jsonl."),
    ("DELETE", _SESSION): Details("End the session. With --out, also write it to episodes.jsonl."),
    ("POST", "/v1/chat/completions"): Details("A chat completion.", ChatRequest),
    ("POST", "/v1/messages"): Details(
        "A message of Anthropic's Messages API.", MessagesRequest, refusal="MessagesError"
    ),
    ("POST", "/v1/messages/count_tokens"): Details(
        "The number of prompt tokens that the request has at /v1/messages.",
        MessagesRequest,
        refusal="MessagesError",
    ),
    ("POST", "/v1/responses"): Details("A response of OpenAI's Responses API.", ResponsesRequest),
    ("GET", "/v1/responses/{response}"): Details("A stored response of the session."),
    ("POST", "/v1/completions"): Details("A text completion.", CompletionRequest),
    ("GET", "/v1/models"): Details("The served model, as a list."),
    ("GET", "/v1/models/{model}"): Details("The served model."),
    ("POST", "/tokenize"): Details(
        "The prompt tokens that a generation would get.", TokenizeRequest
    ),
    ("POST", "/v1/tokenize"): Details("The same as /tokenize.", TokenizeRequest),
}
"""The details by method and path. A route that is served both with and without the prefix
`/sessions/{session}` is listed without it.
"""


def document(routes: Iterable[tuple[str, str]], *, keyed: bool) -> dict[str, Any]:
    """Return the OpenAPI document for `routes`, which are pairs of a method and an aiohttp path.

    `keyed`: the server requires a key.
    """
    paths: dict[str, dict[str, Any]] = {}
    schemas: dict[str, Any] = {"Error": _ERROR, "MessagesError": _MESSAGES_ERROR}
    for method, raw in sorted(set(routes)):
        path = _ANY.sub(r"{\1}", raw)
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, schemas, keyed=keyed)
    scheme = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "toolroll serve", "version": version("toolroll")},
        "paths": paths,
        "components": {"schemas": schemas} | ({"securitySchemes": scheme} if keyed else {}),
    }


def _operation(method: str, path: str, schemas: dict[str, Any], *, keyed: bool) -> dict[str, Any]:
    found = DETAILS.get((method, path)) or DETAILS.get((method, path.removeprefix(_SESSION)))
    details = found or Details(f"{method} {path}.")
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _ANY.findall(path)
    ]
    refused = {"application/json": {"schema": {"$ref": _REF.format(model=details.refusal)}}}
    operation: dict[str, Any] = {
        "summary": details.summary,
        "responses": {
            str(details.success): {"description": "Done.", "content": {details.media: {}}},
            "default": {"description": "Refused, or failed.", "content": refused},
        },
    }
    if parameters:
        operation["parameters"] = parameters
    if keyed and path != "/health":
        operation["security"] = [{"key": []}]
    if details.body is not None:
        schema = {"$ref": _schema(details.body, schemas)}
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    return operation


def _schema(body: type[BaseModel], schemas: dict[str, Any]) -> str:
    """Add to `schemas` the schema of `body` and all schemas that it refers to. Return a reference
    to the schema of `body`.
    """
    made = body.model_json_schema(ref_template=_REF)
    schemas |= made.pop("$defs", {})
    schemas[body.__name__] = made
    return _REF.format(model=body.__name__)


def page(found: Mapping[str, Any]) -> str:
    """Return the OpenAPI document `found` as an HTML page that loads no other files."""
    rows = "\n".join(
        f"<tr><td>{method.upper()}</td><td><code>{escape(path)}</code></td>"
        f"<td>{escape(operation['summary'])}{_body_link(operation)}</td></tr>"
        for path, methods in found["paths"].items()
        for method, operation in methods.items()
    )
    bodies = "\n".join(
        f'<h2 id="{escape(name)}">{escape(name)}</h2><pre>{_shown(schema)}</pre>'
        for name, schema in found["components"]["schemas"].items()
    )
    title = escape(f"{found['info']['title']} {found['info']['version']}")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        "<style>body{font-family:sans-serif;margin:2em;max-width:70em}"
        "td{padding:.2em 1em .2em 0;vertical-align:top}"
        "pre{background:#f4f4f4;padding:1em;overflow:auto}</style>"
        f"<h1>{title}</h1><p>The same as JSON: <a href='openapi.json'>openapi.json</a></p>"
        f"<table>{rows}</table>{bodies}</html>"
    )


def _body_link(operation: Mapping[str, Any]) -> str:
    body = operation.get("requestBody")
    if body is None:
        return ""
    name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    return f' Body: <a href="#{escape(name)}">{escape(name)}</a>'


def _shown(schema: Mapping[str, Any]) -> str:
    return escape(orjson.dumps(schema, option=orjson.OPT_INDENT_2).decode())
