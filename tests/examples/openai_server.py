"""An OpenAI-compatible server that returns scripted answers and records the requests."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer


@contextmanager
def openai_server(answers: list[dict]) -> Iterator[tuple[str, list[dict]]]:
    """Yields the base URL and the bodies of the requests. The server returns `answers` in order."""
    seen: list[dict] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            message = {"role": "assistant", **answers[len(seen)]}
            seen.append(body)
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            answer = {"id": "1", "object": "chat.completion", "created": 0, "model": "policy"}
            raw = json.dumps({**answer, "choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
