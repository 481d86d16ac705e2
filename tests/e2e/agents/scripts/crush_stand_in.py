#!/usr/bin/env python3
"""Has the command line and the settings of Crush, whose program no package index holds.

crush --version
crush run --quiet [--continue] PROMPT
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

SETTINGS = Path.home() / ".config/crush/crush.json"
SESSION = Path.home() / ".stand-in.json"
NAMES = {
    "bash": ["command", "description"],
    "view": ["file_path"],
    "write": ["file_path", "content"],
    "edit": ["file_path", "old_string", "new_string"],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {each: {"type": "string"} for each in names},
                "required": names,
            },
        },
    }
    for name, names in NAMES.items()
]


def run(name: str, given: dict[str, str]) -> str:
    try:
        if name == "bash":
            command = ["bash", "-c", given["command"]]
            done = subprocess.run(command, capture_output=True, text=True, errors="replace")
            return done.stdout + done.stderr
        file = Path(given["file_path"])
        if name == "view":
            return file.read_text(errors="replace")[:2000]
        if name == "edit":
            old = file.read_text()
            if given["old_string"] not in old:
                return "old_string is not in the file"
            file.write_text(old.replace(given["old_string"], given["new_string"], 1))
            return "Edited."
        if name == "write":
            file.write_text(given["content"])
            return "Written."
    except (OSError, KeyError, ValueError) as error:
        return repr(error)
    return f"no tool {name}"


def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
    settings = json.loads(SETTINGS.read_text())
    chosen = settings["models"]["large"]
    provider = settings["providers"][chosen["provider"]]
    body = {"model": chosen["model"], "messages": messages, "tools": TOOLS}
    request = urllib.request.Request(
        provider["base_url"] + "/chat/completions",
        json.dumps(body).encode(),
        {"authorization": f"Bearer {provider['api_key']}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request) as reply:
        answer: dict[str, Any] = json.load(reply)["choices"][0]["message"]
    return answer


def main() -> None:
    argv = sys.argv[1:]
    if argv == ["--version"]:
        print("crush version stand-in")
        return
    assert argv[:2] == ["run", "--quiet"], argv
    messages = json.loads(SESSION.read_text()) if "--continue" in argv else []
    messages.append({"role": "user", "content": argv[-1]})
    while True:
        answer = ask(messages)
        messages.append(answer)
        for call in answer.get("tool_calls") or ():
            function = call["function"]
            result = run(function["name"], json.loads(function["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        if not answer.get("tool_calls"):
            break
    SESSION.write_text(json.dumps(messages))
    print(messages[-1]["content"])


if __name__ == "__main__":
    main()
