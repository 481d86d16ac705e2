"""The servers that are attacked, each with its ordinary calls."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import struct
import sys
import tarfile
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from agent_loop.extras.swarm import AsyncSwarmClient
from proxy.extras.relay.fingerprint import fingerprint
from proxy.extras.relay.protocol import PATH as RELAY_PATH
from proxy.extras.relay.protocol import PROTOCOL_VERSION
from tests.attacks.bodies import BODIES, CONTROL, HARBOR, SWARM
from tests.attacks.hostile import Attack, Body, Call, Fuzzer
from tests.attacks.server import Server, running_server
from tests.attacks.victim import ADMIN_KEY, Victim, running_victim
from tests.proxy.checkpoint import write_checkpoint

SESSIONS = 8
TOKEN = "a-token-of-the-attack"
REMEMBERED = 32
"""Number of ids of a server's answers that are attacked."""
NUMBERS = ["0", "1", "x", "-1", "nan", "1e999", "9" * 40, "%ff", "%00", "", "0.1", "x" * 300]


class ProxyFuzzer(Fuzzer):
    odd_paths = (
        *("/v1/v1/v1/models", "/sessions/%ff", "/sessions//x", "/sessions/a?since=x"),
        *("/sessions?limit=-1", "/sessions/x/events?after=%00", "/relay", "/v1/models/%ff"),
        "/v1/responses/x",
    )

    def __init__(self, victim: Victim) -> None:
        super().__init__(victim)
        self.victim = victim
        self.sessions: list[tuple[str, str]] = []
        """(trial id, API key) each."""

    async def renew(self) -> list[str]:
        used = [trial for trial, _ in self.sessions]
        handles = [await self.victim.control.create_session() for _ in range(SESSIONS)]
        self.sessions[:] = [(handle.trial_id, handle.api_key) for handle in handles]
        broken = await self._open_turns(used)
        for trial in used:
            await self.victim.control.delete(trial)
        return broken

    async def _open_turns(self, trials: list[str]) -> list[str]:
        """The turns that are open without a call in flight; raises for a record that is not
        readable. Cut calls are given the time to close theirs."""
        found: list[str] = []
        for _ in range(50):
            found = await self.victim.unclosed_turns(trials)
            if not found:
                break
            await asyncio.sleep(0.1)
        return [f"turn stays open: {turn}" for turn in found]

    def kinds(self) -> list[tuple[Callable[[], Attack], int]]:
        return [*super().kinds(), (self.control, 15)]

    def call(self) -> Call:
        route = self.rng.choice(list(BODIES))
        data = BODIES[route]()
        if self.rng.random() < 0.3:
            data["stream"] = True
        if route == "messages" and self.rng.random() < 0.2:
            route = "messages/count_tokens"
        trial, key = self.rng.choice(self.sessions)
        path = f"/{trial}/v1/{route}" if self.rng.random() < 0.5 else f"/v1/{route}"
        return Call(f"POST {route}", "POST", path, {"Authorization": f"Bearer {key}"}, data)

    def control(self) -> Attack:
        name = self.rng.choice(list(CONTROL))
        method, _, path = name.partition(" ")
        data = CONTROL[name]()
        if data and self.rng.random() < 0.8:
            self.mutate(data)
        trial, _ = self.rng.choice(self.sessions)
        path = path.replace("/S", f"/{trial}", 1) if "/S" in path else path
        key = self.rng.choice([ADMIN_KEY, ADMIN_KEY, ADMIN_KEY, "wrong", ""])
        if name == "POST /sessions/S/complete" and self.rng.random() < 0.95:
            path = "/sessions/none/complete"  # or soon every session refuses its calls
        if name in ("POST /engines", "DELETE /engines/e"):
            key = self.rng.choice(["wrong", ""])  # a foreign engine would take calls
        call = Call(name, method, path, {"Authorization": f"Bearer {key}"}, data)
        return Attack(name, self.request(call, self.pack(call)))


class RelayFuzzer(ProxyFuzzer):
    """Workers that break the relay's protocol, while agents make calls that some of them get."""

    def __init__(self, victim: Victim) -> None:
        super().__init__(victim)
        model = fingerprint(victim.checkpoint)
        self.model = [model.tokenizer, model.architecture]

    def kinds(self) -> list[tuple[Callable[[], Attack], int]]:
        return [*super().kinds(), (self.worker, 200)]

    def worker(self) -> Attack:
        headers = {
            "Authorization": f"Bearer {TOKEN if self.rng.random() < 0.95 else 'wrong'}",
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": base64.b64encode(self.rng.randbytes(16)).decode(),
        }
        if self.rng.random() < 0.1:
            headers[self.rng.choice(list(headers))] = self.rng.choice(["", "x", "websocket", "0"])
        if self.rng.random() < 0.1:
            headers["Sec-WebSocket-Extensions"] = "permessage-deflate"
        hello = [*("hello", PROTOCOL_VERSION, f"w{self.rng.randrange(9)}", "i"), self.model]
        hello += [None, 0, None, 4, []]
        frames = [self._frame(hello, 0.3)]
        frames += [self._frame(self._message(), 0.7) for _ in range(self.rng.randrange(6))]
        request = self.request(Call("", "GET", RELAY_PATH, headers), b"")
        return Attack("worker", request, owed=False, then=frames)

    def _message(self) -> list[Any]:
        number, size = self.rng.randrange(6), self.rng.randrange(4)
        ids, logprobs = struct.pack("<4i", 1, 2, 3, 4)[: 4 * size], b"\0" * 4 * size
        finish = self.rng.choice([None, None, "stop"])
        frame = ["frame", number, 0, ids, logprobs, None, finish, None, [[0, 0, size]]]
        health = ["health", number, 0, None]
        failed = ["frame", number, 0, b"", b"", None, None, None, [], "no", True]
        return self.rng.choice([frame, frame, health, ["leave"], failed])

    def _frame(self, message: list[Any], hostile: float) -> bytes:
        """A frame of a WebSocket; with this probability something in it is wrong."""
        if self.rng.random() < hostile:
            self.mutate(message)
        try:
            data = msgspec.msgpack.encode(message)
        except (OverflowError, UnicodeEncodeError, RecursionError):
            data = self.rng.randbytes(50)
        head, masked, size = 0x82, 0x80, len(data)
        if self.rng.random() < hostile / 4:
            head = self.rng.choice([0x81, 0x80, 0x02, 0xC2, 0x83, 0x88, 0x89, 0x8A, 0x8F])
            masked = self.rng.choice([0x80, 0x80, 0])
            size = self.rng.choice([size, size, 2**63, 0, 5])
        length = bytes([masked | size]) if size < 126 else bytes([masked | 127]) + _long(size)
        return bytes([head]) + length + b"\0\0\0\0" * bool(masked) + data


class TableFuzzer(Fuzzer):
    """A server whose calls are a table: `METHOD path` → body. `ID` in a path is an id that an
    answer gave, and `N` in a query a number that may be none."""

    table: ClassVar[dict[str, Callable[[], Body]]]
    often: ClassVar[str]
    """The beginning of the calls that are drawn more often, because the others need their ids."""

    def __init__(self, server: Server, token: str) -> None:
        super().__init__(server)
        self.health_key = self.token = token
        self.known: deque[tuple[str, str]] = deque([("none", "none")], REMEMBERED)
        """(id, key) each."""

    def call(self) -> Call:
        names = list(self.table)
        name = self.rng.choices(names, [5 if each.startswith(self.often) else 1 for each in names])[
            0
        ]
        method, _, path = name.partition(" ")
        one, key = self.rng.choice(self.known)
        path = path.replace("ID", one).replace("=N", f"={self.rng.choice(NUMBERS)}")
        token = self.rng.choices([self.token, "wrong"], (0.95, 0.05))[0]
        headers = {"Authorization": f"Bearer {token}", **self.headers(name, key)}
        return Call(name, method, path, headers, self.table[name]())

    def kinds(self) -> list[tuple[Callable[[], Attack], int]]:
        return [*super().kinds(), (self.ordinary, 30)]

    def ordinary(self) -> Attack:
        call = self.call()
        return Attack(call.name, self.request(call, self.pack(call)))

    def headers(self, name: str, key: str) -> dict[str, str]:
        return {}

    def known_of(self, answer: bytes, field: str) -> dict[str, Any]:
        """The answer's object if it has this field, else an empty one."""
        _, _, body = answer.partition(b"\r\n\r\n")
        try:
            found = json.loads(body)
        except ValueError:  # an error's text, or not the whole answer
            return {}
        return found if isinstance(found, dict) and field in found else {}


class SwarmFuzzer(TableFuzzer):
    table = SWARM
    often = "POST /v1/episodes"
    odd_paths = ("/v1/episodes/%ff/end", "/v1/episodes//outcome", "/v1/status?wait_s=nan")

    async def renew(self) -> list[str]:
        """Starts the trainer again if it was stopped."""
        async with AsyncSwarmClient(self.server.url, self.token) as swarm:
            await swarm.auto_start("model: {path: m}")
        return []

    def call(self) -> Call:
        call = super().call()
        if call.name == "POST /v1/stop" and self.rng.random() < 0.99:
            call.headers["Authorization"] = "Bearer wrong"  # starting a trainer takes seconds
        if call.name == "POST /v1/episodes":
            call.data["kind"] = self.rng.choice(["train", "train", "eval"])
            call.data["task_id"] = f"t{self.rng.randrange(50)}"
        return call

    def headers(self, name: str, key: str) -> dict[str, str]:
        return {"X-Episode-Key": key} if "ID" in name else {}

    def learn(self, answer: bytes) -> None:
        if claimed := self.known_of(answer, "key"):
            self.known.append((claimed["episode_id"], claimed["key"]))


class HarborFuzzer(TableFuzzer):
    table = HARBOR
    often = "POST /api/v1/runs"
    odd_paths = ("/api/v1/runs/%ff", "/api/v1/runs//logs", "/api/v1/runs?limit=%00")

    def headers(self, name: str, key: str) -> dict[str, str]:
        return {"Last-Event-ID": self.rng.choice(NUMBERS)} if name.endswith("/events") else {}

    def pack(self, call: Call) -> bytes:
        """A form of metadata and, in half of the submissions, an archive that may be broken."""
        if call.method != "POST":
            return b""
        call.headers["Content-Type"] = "multipart/form-data; boundary=B"
        archive = _archive() if self.rng.random() < 0.5 else b""
        if archive and self.rng.random() < 0.5:
            archive = self._damage(archive)
        parts = {"metadata": self.dump(call.data), **({"task_archive": archive} if archive else {})}
        form = b"".join(
            b'--B\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n' % (n.encode(), part)
            for n, part in parts.items()
        )
        return form + b"--B--\r\n"

    def learn(self, answer: bytes) -> None:
        if run := self.known_of(answer, "run_id"):
            self.known.append((run["run_id"], ""))


def _long(size: int) -> bytes:
    return struct.pack(">Q", size)


def _archive() -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        tar.addfile(tarfile.TarInfo("task/task.toml"), io.BytesIO())
    return packed.getvalue()


@asynccontextmanager
async def _proxy(folder: Path) -> AsyncIterator[Fuzzer]:
    async with running_victim(folder) as victim:
        yield ProxyFuzzer(victim)


@asynccontextmanager
async def _workers(folder: Path) -> AsyncIterator[Fuzzer]:
    async with running_victim(folder, workers=2) as victim:
        yield ProxyFuzzer(victim)


@asynccontextmanager
async def _relay(folder: Path) -> AsyncIterator[Fuzzer]:
    async with running_victim(folder, relay={"token": TOKEN, "grace_s": 0.2}) as victim:
        yield RelayFuzzer(victim)


@asynccontextmanager
async def _swarm(folder: Path) -> AsyncIterator[Fuzzer]:
    """Its trainer has no model and takes every batch."""
    trainer = (sys.executable, "-m", "tests.agent_loop.extras.swarm.scripted_trainer")
    files = (str(write_checkpoint(folder / "model")), str(folder / "batches.jsonl"))
    serve = ("tests.agent_loop.extras.swarm.serve_process", "127.0.0.1:0", str(folder))
    log = folder / "server.log"
    async with running_server(*serve, *trainer, *files, log=log, AGENTIC_SWARM_TOKEN=TOKEN) as at:
        yield SwarmFuzzer(at, TOKEN)


@asynccontextmanager
async def _harbor(folder: Path) -> AsyncIterator[Fuzzer]:
    serve = ("tests.attacks.harbor_process", str(folder / "state"), TOKEN)
    async with running_server(*serve, log=folder / "server.log") as at:
        yield HarborFuzzer(at, TOKEN)


PLANES: dict[str, Callable[[Path], AbstractAsyncContextManager[Fuzzer]]] = {
    "proxy": _proxy,
    "workers": _workers,
    "relay": _relay,
    "swarm": _swarm,
    "harbor": _harbor,
}
