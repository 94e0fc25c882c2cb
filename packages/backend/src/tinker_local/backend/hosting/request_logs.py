"""The access log, a line for each request; and the audit log, a line for each thing that was made, changed or fetched.

Neither has keys, signed URLs, prompts or data: of paths the template of the route, of bodies the fields in `NAMED`.
"""

import json
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from tinker_local.backend.control.callers import Caller
from tinker_local.backend.control.life_cycle import ControlPlane
from tinker_local.backend.hosting.log_files import Line
from tinker_local.backend.http.access import BODY, CALLER, NAMED_MODEL
from tinker_local.backend.scheduling.operations import Operation, owner_of

_CHECKPOINT = "/api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}"

AUDITED: Mapping[tuple[str, str], str] = {
    ("POST", "/api/v1/create_session"): "create session",
    ("POST", "/api/v1/sessions/{session_id}/finish"): "finish session",
    ("POST", "/api/v1/create_model"): "create training run",
    ("POST", "/api/v1/load_weights"): "load checkpoint",
    ("POST", "/api/v1/create_sampling_session"): "create sampling session",
    ("POST", "/api/v1/save_weights"): "save checkpoint",
    ("POST", "/api/v1/save_weights_for_sampler"): "save checkpoint",
    ("POST", "/api/v1/save_weights_external"): "save checkpoint",
    ("POST", "/api/v1/copy_weights"): "copy checkpoint",
    ("POST", "/api/v1/import_adapter"): "import checkpoint",
    ("POST", f"{_CHECKPOINT}/publish"): "publish checkpoint",
    ("DELETE", f"{_CHECKPOINT}/publish"): "unpublish checkpoint",
    ("PUT", f"{_CHECKPOINT}/ttl"): "change expiry",
    ("DELETE", _CHECKPOINT): "delete checkpoint",
    ("GET", f"{_CHECKPOINT}/external_weights_urls"): "sign download",
    ("GET", "/api/v1/external_weights/{run_id}/{name}/{file}"): "download",
    ("GET", "/api/v1/sessions/{session_id}/trace_export"): "sign download",
    ("GET", "/api/v1/session_traces/{session_id}"): "download",
}
"""What is done to what others could miss or should not have, by method and route."""

SAVED_AS = {
    "/api/v1/save_weights": "weights",
    "/api/v1/save_weights_for_sampler": "sampler_weights",
    "/api/v1/save_weights_external": "external_weights",
}

NAMED = (
    "session_id",
    "model_id",
    "base_model",
    "path",
    "source_path",
    "model_path",
    "tinker_path",
    "ttl_seconds",
    "file",
)
"""Fields of bodies, answers and paths that the audit log has."""

MOST_BYTES = 32 * 1024
"""Of an answer that is read for its ids, and of a body that was refused before it was parsed."""

LONGEST_VALUE = 512

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


Write = Callable[[Line], object]


@dataclass(frozen=True, slots=True)
class Logs:
    """What gets the lines of each log: `LogFile.write`, and functions that tell the operator."""

    access: Sequence[Write] = ()
    audit: Sequence[Write] = ()

    def changed_by_server(self, action: str, path: str) -> None:
        """Audit what the server did by itself to the checkpoint at `path`."""
        self.write_audit({"time": time.time(), "action": action, "by": None, "path": path, "outcome": "ok"})

    def write_audit(self, line: Line) -> None:
        for write in self.audit:
            write(line)


@dataclass(slots=True, eq=False)
class Exchange:
    """One request and its answer. `asked` and `told`: what is kept of their bodies, if they are audited."""

    scope: Scope
    request_id: str
    begun: float = field(default_factory=time.time)
    start: float = field(default_factory=time.perf_counter)
    status: int = 0
    received: int = 0
    sent: int = 0
    asked: bytearray = field(default_factory=bytearray)
    told: bytearray = field(default_factory=bytearray)

    @property
    def route(self) -> str | None:
        """The template of the path; None if no route matches, or the request was refused before routing."""
        return getattr(self.scope.get("route"), "path", None)

    @property
    def action(self) -> str | None:
        return AUDITED.get((self.scope["method"], self.route or ""))

    @property
    def caller(self) -> Caller | None:
        return self.scope.get(CALLER)

    @property
    def address(self) -> str | None:
        return (self.scope.get("client") or (None,))[0]

    def facts(self) -> dict[str, object]:
        """The ids and paths that it names."""
        found: dict[str, object] = {}
        body = self.scope.get(BODY)
        asked = _json(self.asked) if body is None else dict(body)
        for part in (asked, self.scope.get("path_params", {}), _json(self.told)):
            found |= {name: _short(part[name]) for name in NAMED if isinstance(part.get(name), str | int)}
        params = self.scope.get("path_params", {})
        if "run_id" in params and "name" in params:
            kind = params.get("kind", "external_weights")
            found["path"] = _short(f"tinker://{params['run_id']}/{kind}/{params['name']}")
        elif self.route in SAVED_AS and "path" in found:
            found["path"] = _short(f"tinker://{found.get('model_id')}/{SAVED_AS[self.route]}/{found['path']}")
        if "tinker_path" in found:
            found["path"] = found.pop("tinker_path")
        return found


class RequestLogs:
    """Writes `logs`, and gives each answer the `X-Request-Id` that they have: that of the request, or a new one."""

    def __init__(self, app: ASGIApp, backend: ControlPlane, logs: Logs) -> None:
        self._app = app
        self._backend = backend
        self._logs = logs
        self._followed: WeakSet[Operation[Any]] = WeakSet()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        one = Exchange(scope, given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8))
        audits = bool(self._logs.audit)

        async def receiving() -> Message:
            message = await receive()
            body = message.get("body", b"")
            one.received += len(body)
            if audits and one.received <= MOST_BYTES and one.action:
                one.asked += body
            return message

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                one.status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = one.request_id
            else:
                body = message.get("body", b"")
                one.sent += len(body)
                if audits and one.sent <= MOST_BYTES and one.action:
                    one.told += body
            await send(message)

        try:
            await self._app(scope, receiving, sending)
        except BaseException:
            one.status = one.status or 500
            raise
        finally:
            self._log(one)

    def _log(self, one: Exchange) -> None:
        caller = one.caller
        if self._logs.access:
            line = {
                "time": one.begun,
                "method": one.scope["method"],
                "route": one.route,
                "status": one.status,
                "ms": round(1000 * (time.perf_counter() - one.start), 1),
                "bytes_in": one.received,
                "bytes_out": one.sent,
                "owner": None if caller is None else caller.owner,
                "address": one.address,
                "request": one.request_id,
            }
            for write in self._logs.access:
                write(line)
        if self._logs.audit and (action := one.action) is not None:
            self._audit(one, action)
        if self._logs.audit and (named := one.scope.get(NAMED_MODEL)) is not None:
            self._audit_model(one, named)

    def _audit_model(self, one: Exchange, named: Mapping[str, str]) -> None:
        """The first request of an owner that names a model at an endpoint of other APIs, or one that may not."""
        ends: dict[str, object] = {"outcome": "ok"} if "session_id" in named else {"outcome": "refused"}
        line: dict[str, object] = {
            "time": one.begun,
            "action": "use model at an endpoint",
            "by": None if one.caller is None else one.caller.owner,
            **{name: _short(value) for name, value in named.items()},
            "address": one.address,
            "request": one.request_id,
            **ends,
            "status": one.status,
        }
        self._logs.write_audit(line)

    def _audit(self, one: Exchange, action: str) -> None:
        facts = one.facts()
        if one.route in SAVED_AS and "path" not in facts:
            return  # an ephemeral version, one of each step, which ends with its session
        line: dict[str, object] = {
            "time": one.begun,
            "action": action,
            "by": None if one.caller is None else one.caller.owner,
            **facts,
            "address": one.address,
            "request": one.request_id,
        }
        if action == "download":
            line["bytes"] = one.sent
        operation = self._backend.operations.get(str(_json(one.told).get("request_id"))) if one.status == 200 else None
        if operation is None:
            line |= {"outcome": "ok" if one.status < 400 else "refused", "status": one.status}
            if isinstance(why := _json(one.told).get("detail"), str):
                line["why"] = _short(why)
            self._logs.write_audit(line)
        elif operation not in self._followed:  # a request that is sent again is the same operation
            self._followed.add(operation)
            line["model_id"] = owner_of(operation.request_id)

            def ended(operation: Operation[Any]) -> None:
                outcome = operation.timeline.outcome
                ends = {"outcome": "ok"}
                if outcome != "ok":
                    ends = {"outcome": "failed", "category": outcome, "why": operation.timeline.error}
                self._logs.write_audit({**line, "time": time.time(), **ends})

            operation.when_done(ended)


def _json(body: bytearray) -> Mapping[str, Any]:
    """A JSON object; empty for anything else."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _short(value: str | int) -> str | int:
    return value[:LONGEST_VALUE] if isinstance(value, str) else value
