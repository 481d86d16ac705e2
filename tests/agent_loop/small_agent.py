"""An agent that needs only the standard library: makes `turns` calls in one conversation, then
exits with `exit_code` or hangs if `hang` is set. These are fields of its task. `dies_after` kills
the agent after that many answers, and `hangs_after` makes it hang; `says` is its reply to every
answer, and `leaves` names an empty file that it makes at its end."""

import json
import os
import pathlib
import signal
import sys
import time
import urllib.request

task = json.loads(pathlib.Path(os.environ["TASK_FILE"]).read_text())
messages = [{"role": "user", "content": os.environ["TASK_PROMPT"]}]
for number in range(task.get("turns", 1)):
    body = {"model": os.environ["AGENT_MODEL"], "messages": messages, **task.get("sampling", {})}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {
            "Content-Type": "application/json",
            "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
        },
    )
    with urllib.request.urlopen(request) as response:
        message = json.loads(response.read())["choices"][0]["message"]
    print(message["content"], flush=True)
    messages += [message, {"role": "user", "content": task.get("says", "Go on.")}]
    if number + 1 == task.get("dies_after"):
        os.kill(os.getpid(), signal.SIGKILL)
    if number + 1 == task.get("hangs_after"):
        time.sleep(600)
pathlib.Path("key").write_text(os.environ["OPENAI_API_KEY"])
pathlib.Path("model").write_text(os.environ["AGENT_MODEL"])
pathlib.Path("answer").write_text(messages[-2]["content"] if len(messages) > 1 else "")
if "leaves" in task:
    pathlib.Path(task["leaves"]).touch()
if task.get("hang"):
    pathlib.Path("hanging").write_text(str(os.getpid()))
    time.sleep(600)
sys.exit(task.get("exit_code", 0))
