"""vLLM's control routes without a model: accepts any weights and reports their version.

It runs in this process, or as a separate one: `python fake_engine.py HOST PORT KEY_FD`. A separate
process requires the key that it reads from KEY_FD, like a vLLM server that the run starts.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

from proxy.machine.secrecy import from_pipe

ANSWERED_BY_THE_DEAD = ("/health", "/die", "/die_deaf")


class FakeEngine:
    def __init__(self) -> None:
        self.version = "0"
        self.adapters: dict[str, str] = {}
        """Name of a LoRA adapter → its folder."""
        self.held: Mapping[str, str] | None = None
        """Name of a weight → the type in which the engine reports to hold it; of any other, that
        of the question. None: it cannot report types."""
        self.calls: list[str] = []
        self.is_dead = False
        """Whether the server behaves like a vLLM server whose engine process has died: it runs, but
        is not healthy."""
        self.hangs = False
        """Whether it answers nothing but `/health`."""
        self.never_answers = ""
        """A route whose requests wait until the engine is `released`."""
        self.refuses_resets = 0
        """How many resets of its caches it refuses, because it loads keys and values."""
        self.resets = True
        """Whether it resets its caches."""
        self.waiting = threading.Event()
        self.released = threading.Event()

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, object]:
        route = path.partition("?")[0]
        self.calls.append(route)
        if route == self.never_answers or (self.hangs and route not in ANSWERED_BY_THE_DEAD):
            self.waiting.set()
            self.released.wait()
        self.is_dead = self.is_dead or route == "/die"
        self.hangs = self.hangs or route in ("/die", "/die_deaf")
        if route == "/init_weight_transfer_engine" and "report" in body["init_info"]:
            report = {"digest": body["init_info"]["digest"], "reason": ""}
            with suppress(OSError):  # as vLLM's side: the holder of the memory has ended
                Path(body["init_info"]["report"]).write_text(json.dumps(report) + "\n")
        if route == "/finish_weight_update":
            self.version = body["weight_version"]
        if route == "/v1/load_lora_adapter":
            self.adapters[body["lora_name"]] = body["lora_path"]
        if route == "/v1/unload_lora_adapter":
            del self.adapters[body["lora_name"]]
        if route == "/collective_rpc":
            return {"results": [self._report(body["method"], body["args"])]}
        if route == "/inference/v1/generate":
            return _certain(body["token_ids"], body["sampling_params"]["logprob_token_ids"][0])
        if route == "/v1/models":
            return {"data": [{"id": "m"}, *({"id": n, "parent": "m"} for n in self.adapters)]}
        success = True
        if route == "/reset_prefix_cache":
            if self.refuses_resets:
                self.refuses_resets -= 1
                return {"error": "running requests waiting for remote KV transfer"}
            success = self.resets and "reset_external=true" in path
        return {"weight_version": self.version, "success": success, "world_size": 1}

    def _report(self, method: str, arguments: Sequence[str]) -> list[str]:
        """A worker's answer to `/collective_rpc`."""
        if method == "__dir__":
            return [] if self.held is None else ["held_dtypes"]
        held = self.held or {}
        return [held.get(name, dtype) for name, dtype, _ in json.loads(arguments[0])]


def _certain(ids: Sequence[int], last: int) -> dict[str, object]:
    """The answer to a scoring call of an engine that gives every token the probability 1."""
    prompt = [None, *({str(each): {"logprob": 0.0}} for each in ids[1:])]
    listed = {"top_logprobs": [{"token_id": last, "logprob": 0.0}]}
    return {"prompt_logprobs": prompt, "choices": [{"logprobs": {"content": [listed]}}]}


Engine = TypeVar("Engine", bound=FakeEngine)


@contextmanager
def serving(engine: Engine) -> Iterator[tuple[Engine, str]]:
    server = _server(engine, "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield engine, f"http://127.0.0.1:{server.server_port}"
    finally:
        engine.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


def fake_engine() -> AbstractContextManager[tuple[FakeEngine, str]]:
    return serving(FakeEngine())


def _server(
    engine: FakeEngine, host: str, port: int, key: str | None = None
) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            if key is not None and not self._authorised():
                self.send_error(401)
                return
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length) or b"{}")
            said = engine.answer(self.path, body)
            if self.path == "/die_deaf":
                server.stop_listening()
            answer = json.dumps(said).encode()
            dead = engine.is_dead and self.path == "/health"
            self.send_response(503 if dead else 500 if "error" in said else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST  # noqa: N815

        def _authorised(self) -> bool:
            return self.path == "/health" or self.headers["Authorization"] == f"Bearer {key}"

        def log_message(self, *_: object) -> None:
            pass

    server = _Server((host, port), Handler)
    return server


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def stop_listening(self) -> None:
        self.shutdown()
        self.socket.close()


if __name__ == "__main__":
    key = from_pipe(int(sys.argv[3]))
    _server(FakeEngine(), sys.argv[1], int(sys.argv[2]), key).serve_forever()
    # As vLLM after the death of its engine process: it waits for requests that are never answered.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pause()
