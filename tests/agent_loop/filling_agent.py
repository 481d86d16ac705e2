"""An agent of the standard library. With the field `fills` in its task, it fills the disk of its
working directory, and hangs; otherwise it waits until the test has seen that the disk is full, and
makes three calls, each of which it repeats while the proxy is out of order."""

import json
import os
import pathlib
import time
import urllib.error
import urllib.request

task = json.loads(pathlib.Path(os.environ["TASK_FILE"]).read_text())
full = pathlib.Path(task["full"])


def call(messages: list) -> dict:
    body = json.dumps({"model": os.environ["AGENT_MODEL"], "messages": messages}).encode()
    headers = {
        "Content-Type": "application/json",
        "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
    }
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    while True:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as response:
                return json.loads(response.read())["choices"][0]["message"]
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
            time.sleep(float(error.headers["Retry-After"]) / 10)


messages = [{"role": "user", "content": os.environ["TASK_PROMPT"]}]
if task.get("fills"):
    messages.append(call(messages))
    with open("filler", "wb", buffering=0) as file:
        if task["fills"] == "a deleted file":
            os.unlink("filler")
        try:
            while True:
                file.write(bytes(1 << 20))
        except OSError:
            time.sleep(600)
while not full.exists():
    time.sleep(0.05)
for _ in range(3):
    messages += [call(messages), {"role": "user", "content": "Go on."}]
