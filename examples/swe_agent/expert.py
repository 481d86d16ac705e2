"""The scripted expert of the warm-up, which makes mistakes on purpose.

Its transcripts contain exactly the messages that SWE-agent sends (`tests/e2e/agents` compares them
with the real agent's); its calls are not run, and their results are written here.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from examples.repositories import experts
from examples.repositories.tasks import File, new_repository, new_task
from examples.starter_model.transcripts import Transcript

SYSTEM = "You work on a folder of Python files."
"""The system_template of config.yaml."""
TOOLS: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("tools.json").read_text(encoding="utf-8")
)
"""What the agent offers with the bundles of config.yaml."""
EDITOR = "str_replace_editor"
FOLDER = "/root/repo"
"""Where agentic_trainer.yaml shows the agent the repository."""
SAID = "OBSERVATION:\n{text}"
NOTHING = "Your command ran successfully and did not produce any output."
NUMBERED = "Here's the result of running `cat -n` on {what}:\n{lines}\n"
EDITED = (
    "The file {path} has been edited. {numbered}Review the changes and make sure they are as "
    "expected. Edit the file again if necessary.\n"
)
NOT_FOUND = "No replacement was performed, old_str `{text}` did not appear verbatim in {path}.\n"


def transcript(rng: random.Random) -> Transcript:
    """One run of the agent on one task, possibly with mistakes."""
    repository = new_repository(rng)
    return played(repository, new_task(rng, repository), rng)


def played(repository: list[File], task: dict[str, str], rng: random.Random) -> Transcript:
    """A run on this task."""
    file = next(each for each in repository if each.name == task["file"])
    run = experts.Run(
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task["prompt"]}]
    )
    if rng.random() >= experts.STOPS_AT_ONCE:
        if task["kind"] == "find":
            _find(run, task, rng)
        else:
            _change(run, task, file, repository, rng)
    run.ask("submit")
    return Transcript(run.messages, TOOLS)


def _find(run: experts.Run, task: dict[str, str], rng: random.Random) -> None:
    name = f"{task['file']}.py"
    line = f"grep -l 'def {task['function']}(' *.py"
    if rng.random() < experts.ONLY_SHOWS:
        run.call("bash", _said(f"{name}\n"), command=line)
    else:
        run.call("bash", NOTHING, command=f"{line} > answer.txt")


def _change(
    run: experts.Run,
    task: dict[str, str],
    file: File,
    repository: list[File],
    rng: random.Random,
) -> None:
    path = f"{FOLDER}/{file.name}.py"
    for step, wanted in experts.steps(task, file, rng):
        old, new = experts.replaced(task, file, wanted)
        if step == "read":
            run.call(EDITOR, _said(f"{_numbered(path, file.text)}\n"), command="view", path=path)
            continue
        if step == "edit":
            result = _edited(path, file.text.replace(old, new), file.text.index(old))
        else:
            if step == "unread":
                other = next(each for each in repository if each is not file).parameters
                old, new = (f"{each}{other[0]}, {other[1]}):" for each in (old, new))
            else:
                old = experts.not_there(task, old)
            result = NOT_FOUND.format(text=old, path=path)
        run.call(EDITOR, _said(result), command="str_replace", path=path, old_str=old, new_str=new)


def _said(output: str) -> str:
    return SAID.format(text=output)


def _numbered(what: str, text: str) -> str:
    lines = "\n".join(f"{at:6}\t{line}" for at, line in enumerate(text.split("\n"), 1))
    return NUMBERED.format(what=what, lines=lines)


def _edited(path: str, text: str, at: int) -> str:
    """What the editor says of an edit that begins at a character: four lines after it."""
    last = text[:at].count("\n") + 4
    snippet = "\n".join(text.splitlines()[:last])
    return EDITED.format(path=path, numbered=_numbered(f"a snippet of {path}", snippet))
