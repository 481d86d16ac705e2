"""The HTTP side of `harbor-server`.

    POST   /api/v1/runs                  multipart: metadata (JSON), task_archive (tar.gz)
           ?wait_s=…                     default: answers when the run is final (as older clients
                                         expect); 0: 202 at once. Header Idempotency-Key
    GET    /api/v1/runs                  ?job_id= &status= &limit= &offset=
    GET    /api/v1/runs/{id}             ?wait_s=: long-poll until final
    DELETE /api/v1/runs/{id}             cancels
    GET    /api/v1/runs/{id}/events      SSE; Last-Event-ID continues
    GET    /api/v1/runs/{id}/logs        the trial's log; ?tail_bytes=
    GET    /api/v1/runs/{id}/artifacts   names and sizes; …/artifacts/{path}: one file
    GET    /metrics                      Prometheus' text format
    GET    /health

Invariant: every route except /health needs the token (`guard.py`); errors are
`{"error": {"code", "message"}}`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestPayloadError
from pydantic import ValidationError

from harbor_sdk.archive import unpack_task
from harbor_sdk.errors import AgentRunError
from harbor_sdk.ids import new_run_id
from harbor_sdk.models import AgentRun, AgentRunRequest, RunEvent, RunList, RunStatus
from harbor_sdk.server.config import ServerConfig
from harbor_sdk.server.guard import Handler, answer_expect, guard
from harbor_sdk.server.runs import Runs, RunTrial
from harbor_sdk.server.table import RunTable, Submission

MAX_WAIT_S = 60.0
"""Longest long-poll: shorter than load balancers keep an idle connection open."""
MAX_SUBMIT_WAIT_S = 6 * 3600.0
"""Longest time that a submission waits for its result. After it, the answer is 202."""
KEEP_ALIVE_S = 15.0
MAX_METADATA_BYTES = 4 * 2**20
MAX_LOG_BYTES = 1 * 2**20
MAX_PAGE = 500
MAX_DIGITS = 19
"""An event's number has fewer digits, so that the database can compare it."""
CHUNK_BYTES = 256 * 2**10

_log = logging.getLogger(__name__)
_CONFIG = web.AppKey("config", ServerConfig)
_RUNS = web.AppKey("runs", Runs)


def build_app(config: ServerConfig, run_trial: RunTrial) -> web.Application:
    app = web.Application(
        middlewares=[_errors, guard(config.host, config.token)],
        client_max_size=config.max_archive_mb * 2**20,
    )
    app[_CONFIG] = config
    app.cleanup_ctx.append(lambda app: _open_runs(app, run_trial))
    routes = {
        "GET /health": _health,
        "GET /metrics": _metrics,
        "POST /api/v1/runs": _submit,
        "GET /api/v1/runs": _list,
        "GET /api/v1/runs/{run_id}": _get,
        "DELETE /api/v1/runs/{run_id}": _cancel,
        "GET /api/v1/runs/{run_id}/events": _events,
        "GET /api/v1/runs/{run_id}/logs": _logs,
        "GET /api/v1/runs/{run_id}/artifacts": _artifacts,
        "GET /api/v1/runs/{run_id}/artifacts/{path:.+}": _artifact,
        r"* /{path:[\s\S]*}": _no_route,
    }
    for route, handler in routes.items():
        method, _, path = route.partition(" ")
        app.router.add_route(method, path, handler, expect_handler=answer_expect)
    return app


async def _open_runs(app: web.Application, run_trial: RunTrial) -> AsyncIterator[None]:
    state_dir = app[_CONFIG].state_dir
    for folder in ("trials", "tasks", "uploads"):
        (state_dir / folder).mkdir(parents=True, exist_ok=True, mode=0o700)
    app[_RUNS] = Runs(app[_CONFIG], RunTable(state_dir / "runs.sqlite"), run_trial)
    await app[_RUNS].open()
    yield
    await app[_RUNS].close()


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except AgentRunError as error:
        retry_after = error.retry_after_s
        headers = {"Retry-After": str(round(retry_after))} if retry_after is not None else {}
        return _error(error.status or 400, error.code, error.message, headers)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        return _error(400, "invalid", f"metadata.{where}: {first['msg']}", {})


def _error(status: int, code: str, message: str, headers: dict[str, str]) -> web.Response:
    body = {"error": {"code": code, "message": message}}
    return web.json_response(body, status=status, headers=headers)


async def _no_route(request: web.Request) -> web.Response:
    raise AgentRunError(
        f"no route {request.method} {request.path[:200]}", code="not_found", status=404
    )


async def _health(request: web.Request) -> web.Response:
    runs = request.app[_RUNS]
    return web.json_response({"status": "ok", "queued": runs.queued, "running": runs.running})


async def _metrics(request: web.Request) -> web.Response:
    counts = await request.app[_RUNS].counts()
    lines = [
        "# HELP agentic_harbor_runs Runs that the server keeps, by status",
        "# TYPE agentic_harbor_runs gauge",
        *(f'agentic_harbor_runs{{status="{each}"}} {counts.get(each, 0)}' for each in RunStatus),
    ]
    return web.Response(text="\n".join([*lines, ""]), content_type="text/plain")


async def _submit(request: web.Request) -> web.StreamResponse:
    runs = request.app[_RUNS]
    run_id, key = new_run_id(), request.headers.get("Idempotency-Key") or None
    upload = request.app[_CONFIG].state_dir / "uploads" / run_id
    try:
        metadata, has_archive, fingerprint = await _read_form(request, upload)
        run = await runs.known(key, fingerprint)
        if run is None:
            run = await _accept(
                request, run_id, metadata, upload if has_archive else None, key, fingerprint
            )
    finally:
        upload.unlink(missing_ok=True)
    wait_s = _number(request, "wait_s", MAX_SUBMIT_WAIT_S, MAX_SUBMIT_WAIT_S)
    run = await runs.wait(run.run_id, wait_s)
    return _run_response(run, status=200 if run.status.is_final else 202)


async def _read_form(request: web.Request, upload: Path) -> tuple[str, bool, str]:
    """The metadata, whether an archive was sent (it is stored in `upload`), and a digest of
    both."""
    if not request.content_type.startswith("multipart/"):
        raise AgentRunError(
            f"Content-Type is {request.content_type!r}: send multipart/form-data",
            code="invalid",
        )
    try:
        return await _read_parts(request, upload)
    except (ValueError, RequestPayloadError, HttpProcessingError) as error:
        raise AgentRunError(f"the form is broken: {error}", code="invalid") from error


async def _read_parts(request: web.Request, upload: Path) -> tuple[str, bool, str]:
    metadata, has_archive, digest = None, False, hashlib.sha256()
    reader = await request.multipart()
    while part := await reader.next():
        if not isinstance(part, aiohttp.BodyPartReader):
            raise AgentRunError(
                "the form contains a nested multipart: send plain fields", code="invalid"
            )
        if part.name == "metadata":
            content = await _read_part(part, MAX_METADATA_BYTES)
            metadata = content.decode(errors="replace")
            digest.update(content)
        elif part.name == "task_archive":
            has_archive = True
            await _store_part(part, upload, digest, request.app[_CONFIG].max_archive_mb)
    if metadata is None:
        raise AgentRunError("the form has no field metadata (JSON)", code="invalid")
    return metadata, has_archive, digest.hexdigest()


async def _read_part(part: aiohttp.BodyPartReader, limit: int) -> bytes:
    content = bytearray()
    while chunk := await part.read_chunk():
        content += chunk
        if len(content) > limit:
            raise AgentRunError(
                f"field {part.name} is longer than {limit} bytes", code="too_large", status=413
            )
    return bytes(content)


async def _store_part(
    part: aiohttp.BodyPartReader, path: Path, digest: Any, max_archive_mb: int
) -> None:
    size = 0
    with await asyncio.to_thread(path.open, "wb") as file:
        while chunk := await part.read_chunk(CHUNK_BYTES):
            size += len(chunk)
            if size > max_archive_mb * 2**20:
                raise AgentRunError(
                    f"task_archive is larger than {max_archive_mb} MB: raise --max-archive-mb",
                    code="too_large",
                    status=413,
                )
            digest.update(chunk)
            await asyncio.to_thread(file.write, chunk)


async def _accept(
    request: web.Request,
    run_id: str,
    metadata: str,
    upload: Path | None,
    key: str | None,
    fingerprint: str,
) -> AgentRun:
    config, runs = request.app[_CONFIG], request.app[_RUNS]
    wanted = _with_defaults(AgentRunRequest.model_validate_json(metadata), config)
    runs.require_room()
    if upload is not None:
        target = config.state_dir / "tasks" / run_id
        target.mkdir()
        try:
            task_dir: Path | None = await asyncio.to_thread(
                unpack_task, upload, target, max_bytes=config.max_task_mb * 2**20
            )
        except AgentRunError:
            await asyncio.to_thread(shutil.rmtree, target)
            raise
    else:
        task_dir = _known_task(wanted, config)
    run = AgentRun(
        run_id=run_id,
        status=RunStatus.QUEUED,
        job_id=wanted.job_id,
        task_id=wanted.task_id,
        agent=wanted.agent.name or wanted.agent.import_path or "oracle",
        environment=wanted.environment.label or "",
        created_at=time.time(),
    )
    unpacked = config.state_dir / "tasks" / run_id
    try:
        accepted = await runs.submit(Submission(run, wanted, task_dir, key, fingerprint))
    except AgentRunError:  # a concurrent request used the key, or took the last place
        await asyncio.to_thread(shutil.rmtree, unpacked, ignore_errors=True)
        raise
    if accepted.run_id != run_id and upload is not None:  # a concurrent request had the same key
        await asyncio.to_thread(shutil.rmtree, unpacked)
    return accepted


def _with_defaults(wanted: AgentRunRequest, config: ServerConfig) -> AgentRunRequest:
    if wanted.environment.label is not None:
        return wanted
    name = config.environment
    environment = wanted.environment.model_copy(
        update={
            "import_path" if ":" in name else "type": name,
            "kwargs": {**config.environment_kwargs, **wanted.environment.kwargs},
        }
    )
    return wanted.model_copy(update={"environment": environment})


def _known_task(wanted: AgentRunRequest, config: ServerConfig) -> Path | None:
    if wanted.task_name is not None:
        return None
    if wanted.task_path is None:
        raise AgentRunError("no task: send task_archive, task_path or task_name", code="invalid")
    path = Path(wanted.task_path).resolve()
    if not any(path.is_relative_to(root.resolve()) for root in config.task_roots):
        roots = ", ".join(str(root) for root in config.task_roots) or "none are set"
        raise AgentRunError(
            f"task_path {wanted.task_path!r} is not below a --tasks folder ({roots}): send the "
            "task as task_archive",
            code="invalid",
        )
    if not (path / "task.toml").is_file():
        raise AgentRunError(f"task_path {wanted.task_path!r} has no task.toml", code="invalid")
    return path


async def _list(request: web.Request) -> web.Response:
    runs = request.app[_RUNS]
    items, total = await runs.page(
        job_id=request.query.get("job_id"),
        status=request.query.get("status"),
        limit=int(_number(request, "limit", 100.0, MAX_PAGE)),
        offset=int(_number(request, "offset", 0.0, 1e9)),
    )
    page = RunList(items=items, total=total, queued=runs.queued, running=runs.running)
    return web.json_response(text=page.model_dump_json())


async def _get(request: web.Request) -> web.Response:
    wait_s = _number(request, "wait_s", 0.0, MAX_WAIT_S)
    return _run_response(await request.app[_RUNS].wait(request.match_info["run_id"], wait_s))


async def _cancel(request: web.Request) -> web.Response:
    return _run_response(await request.app[_RUNS].cancel(request.match_info["run_id"]))


async def _events(request: web.Request) -> web.StreamResponse:
    runs, run_id = request.app[_RUNS], request.match_info["run_id"]
    await runs.get(run_id)
    last = request.headers.get("Last-Event-ID", "0")
    after = int(last) if last.isascii() and last.isdecimal() and len(last) < MAX_DIGITS else 0
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    events = runs.events(run_id, after)
    pending: asyncio.Task[RunEvent] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(anext(events))
            done, _ = await asyncio.wait([pending], timeout=KEEP_ALIVE_S)
            if not done:
                await response.write(b": keep-alive\n\n")
                continue
            event, pending = pending.result(), None
            await response.write(
                f"id: {event.number}\nevent: {event.kind}\n"
                f"data: {event.model_dump_json()}\n\n".encode()
            )
    except StopAsyncIteration:
        return response
    finally:
        if pending is not None:
            pending.cancel()


async def _logs(request: web.Request) -> web.Response:
    path = await _trial_file(request, "trial.log")
    tail_bytes = int(_number(request, "tail_bytes", MAX_LOG_BYTES, MAX_LOG_BYTES))
    return web.Response(text=await asyncio.to_thread(_tail, path, tail_bytes))


async def _artifacts(request: web.Request) -> web.Response:
    run = await request.app[_RUNS].get(request.match_info["run_id"])
    root = request.app[_RUNS].trials_dir / run.run_id
    files = await asyncio.to_thread(_listing, root)
    return web.json_response({"files": files})


async def _artifact(request: web.Request) -> web.StreamResponse:
    return web.FileResponse(await _trial_file(request, request.match_info["path"]))


async def _trial_file(request: web.Request, name: str) -> Path:
    run = await request.app[_RUNS].get(request.match_info["run_id"])
    root = (request.app[_RUNS].trials_dir / run.run_id).resolve()
    try:
        path = (root / name).resolve()  # links that lead outside are refused
        if path.is_relative_to(root) and path.is_file():
            return path
    except (ValueError, OSError):  # a name that no file can have
        pass
    raise AgentRunError(f"run {run.run_id} has no file {name!r}", code="not_found", status=404)


def _listing(root: Path) -> list[dict[str, object]]:
    return [
        {"path": str(path.relative_to(root)), "bytes": path.stat().st_size}
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.is_symlink()
    ]


def _tail(path: Path, size: int) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read(size).decode(errors="replace")


def _run_response(run: AgentRun, *, status: int = 200) -> web.Response:
    return web.json_response(text=run.model_dump_json(), status=status)


def _number(request: web.Request, name: str, default: float, bound: float = math.inf) -> float:
    text = request.query.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise AgentRunError(f"{name}={text!r}: give a number of 0 or more", code="invalid")
    return min(value, bound)
