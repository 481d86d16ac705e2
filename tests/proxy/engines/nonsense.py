"""Invalid answers in the wire format of each kind of engine, and a server that sends them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any

import orjson
from aiohttp import web

VOCAB_SIZE = 600
MAX_TOKENS = 8
Body = dict[str, Any]


@dataclass(frozen=True)
class Event:
    """The content of one event, independent of the wire format."""

    ids: tuple[int, ...] = (5,)
    logprobs: tuple[float, ...] = (-0.5,)
    finish: str | None = None
    versions: tuple[tuple[str, int, int], ...] | None = None
    choice: int = 0
    tops: int | None = None
    """Number of tokens for which alternatives are sent."""
    text: str = "Hello"


PIECE = Event()
END = Event((2,), (-0.5,), "stop")
NONSENSE: dict[str, list[Event]] = {
    "id outside the vocabulary": [PIECE, Event((VOCAB_SIZE,))],
    "negative id": [PIECE, Event((-1,))],
    "id past int32": [PIECE, Event((2**31,))],
    "id past int64": [PIECE, Event((2**63,))],
    "log-probability +5": [PIECE, Event(logprobs=(5.0,))],
    "log-probability past float32": [PIECE, Event(logprobs=(-1e300,))],
    "log-probability with which nothing is sampled": [PIECE, Event(logprobs=(-5000.0,))],
    "more ids than log-probabilities": [PIECE, Event((5, 6), (-0.5,))],
    "more log-probabilities than ids": [PIECE, Event((5,), (-0.5, -0.5))],
    "more than max_tokens": [PIECE] * 9 + [END],
    "more than max_tokens in one event": [Event((5,) * 9, (-0.5,) * 9, "length")],
    "second choice": [PIECE, replace(PIECE, choice=1), END],
    "tokens after the finish": [PIECE, END, PIECE],
    "two finishes": [PIECE, END, END],
    "unknown finish reason": [PIECE, replace(END, finish="tired")],
    "gap between version spans": [PIECE, replace(END, versions=(("1", 0, 1), ("2", 2, 2)))],
    "overlapping version spans": [PIECE, replace(END, versions=(("1", 0, 2), ("2", 1, 2)))],
    "version spans that end early": [PIECE, replace(END, versions=(("1", 0, 1),))],
    "version spans that end late": [PIECE, replace(END, versions=(("1", 0, 3),))],
    "version past int32": [PIECE, replace(END, versions=((str(2**31), 0, 2),))],
    "version of 5000 digits": [PIECE, replace(END, versions=(("9" * 5000, 0, 2),))],
    "alternatives of other tokens": [PIECE, Event(tops=3)],
    "no finish": [PIECE],
}
ENDLESS = "endless stream"


class Form:
    """A wire format; `kinds` are the faults that it can express."""

    route: str
    without: frozenset[str] = frozenset()

    def write(self, event: Event, before: list[Event]) -> Body:
        raise NotImplementedError


class Vllm(Form):
    route = "/inference/v1/generate"
    # Ids, log-probabilities and alternatives are fields of the same objects.
    without = frozenset({"alternatives of other tokens"})

    def write(self, event: Event, before: list[Event]) -> Body:
        pairs = zip(event.ids, event.logprobs, strict=False)
        content = [{"token_id": token, "logprob": value} for token, value in pairs]
        if len(event.logprobs) > len(event.ids):
            content.append({"token_id": 9, "logprob": -0.5})
        spans = [
            dict(zip(("version", "start", "end"), v, strict=True)) for v in event.versions or ()
        ]
        choice = {
            "index": event.choice,
            "token_ids": event.ids,
            "logprobs": {"content": content},
            "finish_reason": event.finish,
            "weight_versions": spans or None,
        }
        return {"choices": [choice]}


_OF_VERSIONS = frozenset(name for name in NONSENSE if "version" in name)


class Completions(Form):
    route = "/v1/completions"
    without = _OF_VERSIONS

    def write(self, event: Event, before: list[Event]) -> Body:
        tops = None
        if event.tops is not None:
            tops = [{"token_id:7": -0.5}] * event.tops
        logprobs = {
            "tokens": [f"token_id:{token}" for token in event.ids],
            "token_logprobs": event.logprobs,
            "top_logprobs": tops,
        }
        choice = {
            "index": event.choice,
            "token_ids": event.ids,
            "logprobs": logprobs,
            "finish_reason": event.finish,
        }
        return {"choices": [choice]}


class Sglang(Form):
    route = "/generate"
    # One list of pairs, one version, and no choices.
    without = (_OF_VERSIONS - {"version past int32", "version of 5000 digits"}) | {
        "second choice",
        "more ids than log-probabilities",
        "more log-probabilities than ids",
    }

    def write(self, event: Event, before: list[Event]) -> Body:
        said = [*before, event]
        pairs = [p for e in said for p in zip(e.ids, e.logprobs, strict=False)]
        meta: Body = {
            "completion_tokens": len(pairs),
            "output_token_logprobs": [[value, token, None] for token, value in pairs],
            "finish_reason": {"type": event.finish} if event.finish else None,
            "weight_version": event.versions[0][0] if event.versions else "default",
        }
        if event.tops is not None:
            meta["output_top_logprobs"] = [[[-0.5, 7, None]]] * (len(pairs) - 1)
            meta["output_top_logprobs"][-1] = [[5.0, 7, None]]
        return {"meta_info": meta}


class Text(Form):
    route = "/v1/completions"
    without = frozenset(
        {name for name in NONSENSE if "id" in name.split() or "ids" in name.split()}
        | {name for name in NONSENSE if "log-prob" in name}
        | _OF_VERSIONS
        | {"alternatives of other tokens", "more than max_tokens in one event"}
    )

    def write(self, event: Event, before: list[Event]) -> Body:
        choice = {"index": event.choice, "text": event.text, "finish_reason": event.finish}
        return {"choices": [choice]}


FORMS: dict[str, Form] = {
    "vllm": Vllm(),
    "completions": Completions(),
    "sglang": Sglang(),
    "text": Text(),
}


@dataclass
class NonsenseServer:
    """Sends `events` in response to each call, in one write or one write per event."""

    form: Form
    events: list[Event] = field(default_factory=list)
    endless: bool = False
    together: bool = False
    url: str = ""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a client has closed its connection early."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            if self.together:
                await response.write(b"".join(self._lines()))
            else:
                for line in self._lines():
                    await response.write(line)
                    await asyncio.sleep(0)
            await response.write(b"data: [DONE]\n\n")
        except (ConnectionError, asyncio.CancelledError):
            self.left.set()
            raise
        return response

    def _lines(self) -> Iterator[bytes]:
        before: list[Event] = []
        for event in repeat(PIECE) if self.endless else self.events:
            yield b"data: " + orjson.dumps(self.form.write(event, before)) + b"\n\n"
            before.append(event)


@asynccontextmanager
async def nonsense_server(form: Form) -> AsyncIterator[NonsenseServer]:
    server, app = NonsenseServer(form), web.Application()

    async def nothing(_: web.Request) -> web.Response:
        return web.json_response({})

    app.router.add_post(form.route, server.answer)
    for path in ("/inference/v1/abort_requests", "/abort_request"):
        app.router.add_post(path, nothing)
    for path in ("/health", "/v1/models", "/weight_info", "/get_model_info"):
        app.router.add_get(path, nothing)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield server
    await runner.cleanup()
