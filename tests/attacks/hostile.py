"""Hostile requests of one kind of server: the part that is the same for all of them.

A `Fuzzer` takes the ordinary calls of its server and mutates, compresses, truncates or frames them
wrongly. The servers' own calls are in `planes.py`.
"""

from __future__ import annotations

import gzip
import json
import random
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.attacks.server import Server

Body = dict[str, Any]

METHODS = ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "PATCH", "X"]
ODD_PATHS = [
    *("/%00", "/%ff%fe", "//", "/../../etc/passwd", "/%2e%2e/%2e%2e", "/a%2fb", "/" + "a/" * 500),
    *("/" + "x" * 7000, "/é", "/%", "/\ud83d", "*", "http://other.test/v1/models", "/v1", "/v1/"),
]
HEADER_NAMES = [
    *("Authorization", "x-api-key", "Host", "Origin", "Content-Type", "Accept", "Expect"),
    *("Sec-Fetch-Site", "x-stainless-retry-count", "Range", "Connection", "Upgrade"),
    *("X-Agentic-Proxy-Sibling", "X-Forwarded-For", "Content-Range", "traceparent", "Cookie"),
    *("X-Episode-Key", "Idempotency-Key", "Last-Event-ID", "Content-Length"),
]
HEADER_VALUES = [
    *("", "\xff", "Bearer", "Bearer \xff\xfe", "Bearer  x  y", "Basic ****", "é", "-1", "9" * 40),
    *("\xc2\xb2", "0", "1e9", "k", "9" * 5000),
    *("http://evil.test", "evil.test", "null", "text/plain", "cross-site", "100-continue"),
    *("websocket", "close, upgrade", "x" * 5000, "\t", "*/*;q=nan", "application/json; charset=x"),
]
NASTY: list[Callable[[random.Random], Any]] = [
    lambda rng: None,
    lambda rng: rng.choice([True, False]),
    lambda rng: rng.choice([0, -1, 1, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**400]),
    lambda rng: rng.choice([1.5, -0.0, 1e308, 5e-324]),
    lambda rng: rng.choice([float("nan"), float("inf"), float("-inf")]),
    lambda rng: rng.choice(["", " ", "\x00", "\ud800", "\udfff\ud800", "é" * 50, "\u202e", "🙂"]),
    lambda rng: rng.choice(["<|im_start|>", "<|im_end|>", "<tool_call>", "</think>", "{" * 300]),
    lambda rng: "x" * rng.choice([1, 1000, 100_000]),
    lambda rng: nested(rng.choice([5, 100, 253, 254, 255, 400, 900]), rng.choice("[{")),
    lambda rng: [],
    lambda rng: {},
    lambda rng: [None] * rng.choice([1, 100]),
    lambda rng: {"type": rng.choice(["text", "image_url", "input_image", "nothing", 7, None])},
    lambda rng: {"$ref": "#/definitions/loop"},
    lambda rng: [[[{}]]],
]


def nested(depth: int, kind: str) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind == "[" else {"a": value}
    return value


@dataclass(slots=True)
class Attack:
    """What one connection sends, and whether the server must answer it."""

    name: str
    data: bytes
    owed: bool = True
    then: Sequence[bytes] = ()
    """Sent one after the other, each after an answer or a short wait."""


@dataclass(slots=True)
class Call:
    """An ordinary request of a server: what the attacks are made of."""

    name: str
    method: str
    path: str
    headers: dict[str, str]
    data: Body = field(default_factory=dict)


class Fuzzer(ABC):
    """Draws attacks. The same `rng` gives the same attack, but for the ids that a server gives."""

    odd_paths: Sequence[str] = ()
    health = "/health"
    health_key = ""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.rng = random.Random()

    @abstractmethod
    def call(self) -> Call: ...

    async def renew(self) -> list[str]:
        """Called before the first attack and every few thousand: what is broken in the server's
        records, and new ids to attack."""
        return []

    def learn(self, answer: bytes) -> None:
        """Gets the beginning of every answer, which may contain ids to attack."""
        return

    def attack(self, rng: random.Random) -> Attack:
        self.rng = rng
        kinds, weights = zip(*self.kinds(), strict=True)
        make: Callable[[], Attack] = rng.choices(kinds, weights)[0]
        return make()

    def kinds(self) -> list[tuple[Callable[[], Attack], int]]:
        return [
            (self.body, 65),
            (self.encoding, 10),
            (self.framing, 10),
            (self.header, 10),
            (self.path, 5),
        ]

    def body(self) -> Attack:
        call = self.call()
        for _ in range(self.rng.choice([0, 1, 1, 1, 2, 4])):
            self.mutate(call.data)
        text = self.pack(call)
        if self.rng.random() < 0.1:
            text = self._damage(text)
        return Attack(call.name, self.request(call, text))

    def encoding(self) -> Attack:
        call = self.call()
        plain = self.pack(call)
        claimed = self.rng.choice(
            ["gzip", "deflate", "br", "zstd", "identity", "none", "gzip, gzip"]
        )
        blanks = self.rng.choice([10**6, 2 * 10**7])
        make: Callable[[], bytes] = self.rng.choice(
            [
                lambda: plain,
                lambda: gzip.compress(plain, 1),
                lambda: zlib.compress(plain),
                lambda: gzip.compress(plain, 1)[:-5],
                lambda: gzip.compress(b" " * blanks, 9),
                lambda: self.rng.randbytes(100),
                lambda: b"",
            ]
        )
        sent = make()
        call.headers["Content-Encoding"] = claimed
        return Attack(f"{call.name} as {claimed}", self.request(call, sent))

    def framing(self) -> Attack:
        call = self.call()
        body = self.pack(call)
        line = f"{call.method} {call.path}".encode("latin-1", "replace")
        key = call.headers["Authorization"].encode("utf-8", "replace")
        start = line + b" HTTP/1.1\r\nHost: " + self.host.encode()
        start += b"\r\nAuthorization: " + key + b"\r\nContent-Type: application/json\r\n"
        size = str(len(body)).encode()
        chunk = b"%x\r\n%s\r\n" % (len(body), body)
        lengths = b"Content-Length: " + size
        forms = {
            "cut body": start + lengths + b"0\r\n\r\n" + body,
            "two lengths": start + lengths + b"\r\nContent-Length: 1\r\n\r\n" + body,
            "negative length": start + b"Content-Length: -1\r\n\r\n" + body,
            "length of words": start + b"Content-Length: many\r\n\r\n" + body,
            "huge length": start + b"Content-Length: 99999999999999999999\r\n\r\n" + body,
            "chunks": start + b"Transfer-Encoding: chunked\r\n\r\n" + chunk + b"0\r\n\r\n",
            "chunk cut": start + b"Transfer-Encoding: chunked\r\n\r\n" + chunk[:-9],
            "bad chunk": start + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + body,
            "both": start
            + lengths
            + b"\r\nTransfer-Encoding: chunked\r\n\r\n"
            + chunk
            + b"0\r\n\r\n",
            "no end of head": start,
            "old version": start.replace(b"HTTP/1.1", b"HTTP/0.9") + b"\r\n",
            "no version": line + b"\r\n\r\n",
            "noise": self.rng.randbytes(200),
            "tls hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + self.rng.randbytes(200),
            "many headers": start + b"A: b\r\n" * 20_000 + b"\r\n",
            "long header": start + b"A: " + b"b" * 200_000 + b"\r\n\r\n",
            "nul in header": start + b"A: b\x00c\r\n" + lengths + b"\r\n\r\n" + body,
            "pipelined noise": start + lengths + b"\r\n\r\n" + body + self.rng.randbytes(50),
            "h2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        }
        name = self.rng.choice(list(forms))
        return Attack(name, forms[name], owed=False)

    def header(self) -> Attack:
        call = self.call()
        name, value = self.rng.choice(HEADER_NAMES), self.rng.choice(HEADER_VALUES)
        call.headers[name] = value
        owed = name not in ("Expect", "Upgrade", "Connection", "Content-Length")
        data = self.request(call, self.pack(call))
        return Attack(f"{name}: {value[:30]!r}", data, owed=owed)

    def path(self) -> Attack:
        call = self.call()
        call.method = self.rng.choice(METHODS)
        call.path = self.rng.choice([*ODD_PATHS, *self.odd_paths])
        owed = call.path[0] == "/" and call.path.isascii()
        data = self.request(call, b"")
        return Attack(f"{call.method} {call.path[:40]}", data, owed=owed)

    def mutate(self, data: Any) -> None:
        places: list[tuple[Any, Any]] = []
        _places(data, places)
        if not places:
            return
        holder, at = self.rng.choice(places)
        what = self.rng.random()
        if what < 0.15:
            del holder[at]
        elif what < 0.2 and isinstance(holder, dict):
            holder[self.rng.choice(["", "\x00", "__proto__", "type", "é", "x" * 300])] = 1
        elif what < 0.3 and isinstance(holder, list):
            holder.extend([holder[at]] * self.rng.choice([1, 3, 50]))
        else:
            holder[at] = self.rng.choice(NASTY)(self.rng)

    def pack(self, call: Call) -> bytes:
        """The call's body; may set its `Content-Type`."""
        return b"" if call.method == "GET" else self.dump(call.data)

    def dump(self, data: Any) -> bytes:
        return json.dumps(data, ensure_ascii=self.rng.random() < 0.7).encode(
            "utf-8", "surrogatepass"
        )

    def _damage(self, text: bytes) -> bytes:
        at = self.rng.randrange(len(text) + 1)
        return self.rng.choice(
            [
                text[:at],
                text[:at] + self.rng.randbytes(1) + text[at:],
                b"\xef\xbb\xbf" + text,
                text + text,
                b"[" * 100_000,
                b'{"messages":' * 50_000,
                text[:-1] + b',"model":"n"}',
                text.decode("utf-8", "replace").encode("utf-16"),
            ]
        )

    @property
    def host(self) -> str:
        return f"{self.server.host}:{self.server.port}"

    def request(self, call: Call, body: bytes) -> bytes:
        all_headers = {
            "Host": self.host,
            "Content-Type": "application/json",
            "Connection": "close",
            "Content-Length": str(len(body)),
            **call.headers,
        }
        line = f"{call.method} {call.path} HTTP/1.1"
        head = "\r\n".join([line, *(f"{name}: {value}" for name, value in all_headers.items())])
        return f"{head}\r\n\r\n".encode("latin-1", "replace") + body


def _places(value: Any, found: list[tuple[Any, Any]], levels: int = 20) -> None:
    """Every (holder, key) in the first levels of a JSON value. Deeper ones are left alone: a
    nested value within a nested one could not be written."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(items):
        found.append((value, key))
        if levels and isinstance(inner, dict | list):
            _places(inner, found, levels - 1)
