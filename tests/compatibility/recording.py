"""The shapes of what goes over the wire: the fields of requests and answers of each endpoint, and their kinds."""

import json
from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message
from starlette.routing import Match
from tinker_local.types.wire import tinker_local_wire_pb2 as wire

PASSING = {408, 410, 429, 503}
"""Answers that depend on how fast the server and the checks are (410: a heartbeat just after the end)."""

MAPS = {"user_metadata", "metrics", "urls", "loss_fn_config", "loss_fn_config_v2", "loss_fn_inputs", "fields"}
"""Fields whose keys are anybody's."""

PROTOBUF = "application/x-protobuf"
RESULTS: dict[str, Callable[[], Message]] = {
    "/api/v1/forward_backward": wire.ForwardBackwardOutput,
    "/api/v1/asample": wire.SampleResponse,
}

Shape = Any


def merged(one: Shape, other: Shape) -> Shape:
    """What covers both: fields of either, kinds of either."""
    if one is None or one == other:
        return other
    if other is None:
        return one
    if isinstance(one, dict) and isinstance(other, dict):
        return {key: merged(one.get(key), other.get(key)) for key in sorted(one.keys() | other.keys())}
    if isinstance(one, list) and isinstance(other, list):
        return [merged((one or [None])[0], (other or [None])[0])] if one or other else []
    kinds = {kind for each in (one, other) for kind in (each.split("|") if isinstance(each, str) else [str(each)])}
    return "|".join(sorted(kinds))


def shape(value: Any, name: str = "") -> Shape:
    """Of JSON or of a protobuf message."""
    if isinstance(value, Message):
        return {field.name: _field(field, part) for field, part in sorted(value.ListFields(), key=lambda f: f[0].name)}
    if isinstance(value, dict):
        if name == "user_metadata":  # which run had any when it was asked for is chance
            return {"*": _all(value.values()) or "text"}
        if name in MAPS:
            return {"*": _all(value.values())} if value else {}
        return {key: shape(part, key) for key, part in sorted(value.items())}
    if isinstance(value, list):
        return [_all(value)] if value else []
    kinds = {bool: "bool", str: "text", int: "number", float: "number", bytes: "bytes", type(None): "null"}
    return kinds[type(value)]


def _field(field: Any, value: Any) -> Shape:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return {"*": _all(value.values())}
    return [_all(value)] if hasattr(value, "append") else shape(value)


def _all(values: Any) -> Shape:
    found: Shape = None
    for value in values:
        found = merged(found, shape(value))
    return found


class Recorder:
    """An ASGI app around `app`. `shapes`: by method and path, `{"request": …, "answers": {status: …}}`."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._operations: dict[str, str] = {}  # request ids and the endpoints that gave them
        self.shapes: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._app, name)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked, answered, start = bytearray(), bytearray(), {}

        async def receiving() -> Any:
            message = await receive()
            asked.extend(message.get("body", b""))
            return message

        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
            answered.extend(message.get("body", b""))
            await send(message)

        path = self._path(scope)
        await self._app(scope, receiving, sending)
        if path is not None and start and start["status"] not in PASSING:
            self._note(path, scope, bytes(asked), start, bytes(answered))

    def _path(self, scope: Any) -> str | None:
        for route in self._app.routes:
            if route.matches(scope)[0] is Match.FULL:
                return str(route.path)
        return None

    def _note(self, path: str, scope: Any, asked: bytes, start: Any, answered: bytes) -> None:
        request = _body(asked, _kind(scope["headers"]), wire.ForwardBackwardRequest)
        name, operation = f"{scope['method']} {path}", ""
        if path.endswith("/retrieve_future") and isinstance(request, dict):
            operation = self._operations.get(request["request_id"], "")
            name = f"{name} of {operation}"
        answer = _body(answered, _kind(start["headers"]), RESULTS.get(operation, wire.SampleResponse))
        if isinstance(answer, dict) and isinstance(answer.get("request_id"), str):
            self._operations[answer["request_id"]] = path
        found = self.shapes.setdefault(name, {"request": None, "answers": {}})
        found["request"] = merged(found["request"], shape(request))
        status = str(start["status"])
        found["answers"][status] = merged(found["answers"].get(status), shape(answer))


def _kind(headers: Any) -> str:
    return next((value.decode() for name, value in headers if name.lower() == b"content-type"), "")


def _body(data: bytes, kind: str, message: Callable[[], Message]) -> Any:
    if not data:
        return None
    if kind.startswith(PROTOBUF):
        parsed = message()
        parsed.ParseFromString(data)
        return parsed
    if kind.startswith("application/json"):
        return json.loads(data)
    return data


def written(shapes: dict[str, Any]) -> str:
    """As it is kept."""
    return json.dumps(shapes, indent=1, sort_keys=True) + "\n"
