"""An agent that uses only the standard library and reports its progress to its observer.

    steady_agent.py FIFO [hang | stubborn]

It calls again while the proxy is away, as every SDK does. With `hang` it waits after its first
answer until it is ended; with `stubborn` it is not ended by SIGTERM either.
"""

import http.client
import json
import os
import pathlib
import signal
import sys
import time
import urllib.error
import urllib.request

TURNS = 2
MAX_TOKENS = 20


def tell(word: str) -> None:
    with open(sys.argv[1], "wb", buffering=0) as observer:
        observer.write(f"{word} {os.getpid()}\n".encode())


def call(messages: list[dict[str, str]]) -> dict[str, str]:
    body = {"model": "policy", "messages": messages, "max_tokens": MAX_TOKENS}
    headers = {"Content-Type": "application/json"}
    headers["Authorization"] = "Bearer " + os.environ["OPENAI_API_KEY"]
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    for _ in range(6000):  # as long as the test waits: an engine starts slowly on a busy machine
        try:
            request = urllib.request.Request(url, json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request) as response:
                message: dict[str, str] = json.loads(response.read())["choices"][0]["message"]
                return message
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
        except (urllib.error.URLError, ConnectionError, http.client.HTTPException):
            pass
        time.sleep(0.1)
    raise SystemExit("nobody answers")


def main() -> None:
    mode = sys.argv[2] if len(sys.argv) > 2 else ""
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, lambda *_: tell("SIGTERM"))
    messages = [{"role": "user", "content": os.environ["TASK_PROMPT"]}]
    for _ in range(TURNS):
        message = call(messages)
        messages += [message, {"role": "user", "content": "Go on."}]
        tell("answered")
        while mode:
            signal.pause()
    pathlib.Path("answer").write_text("".join(m["content"] for m in messages[1::2]))


if __name__ == "__main__":
    main()
