"""vLLM's control routes without a model: takes any weights, and tells their version.

In this process, or as one of its own: `python fake_engine.py HOST PORT`.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FakeEngine:
    def __init__(self) -> None:
        self.version = "0"
        self.calls: list[str] = []

    def answer(self, path: str, body: dict[str, str]) -> dict[str, object]:
        route = path.partition("?")[0]
        self.calls.append(route)
        if route == "/finish_weight_update":
            self.version = body["weight_version"]
        return {"weight_version": self.version, "success": True, "world_size": 1}


@contextmanager
def fake_engine() -> Iterator[tuple[FakeEngine, str]]:
    engine = FakeEngine()
    server = _server(engine, "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield engine, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _server(engine: FakeEngine, host: str, port: int) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length) or b"{}")
            answer = json.dumps(engine.answer(self.path, body)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    return ThreadingHTTPServer((host, port), Handler)


if __name__ == "__main__":
    _server(FakeEngine(), sys.argv[1], int(sys.argv[2])).serve_forever()
