"""The scripted engine's model in a varied trial: it takes the step after the last results."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from proxy.testing.scripted_engine import Fault
from tests.e2e.agents.model import DONE, ENDS, SHELLS, SUBMIT, call, offered_tools, shell_call
from tests.e2e.agents.rewind.varied import Action, EditFile, ReadFile, Shell, VariedTrial, WriteFile

_STEP = re.compile(r"Step (\d+) of \d+\.")
_RESULTS = ("<tool_response>", "<|im_start|>user")
_FILE_TOOLS: dict[type[Action], tuple[str, ...]] = {
    Shell: (),
    WriteFile: ("write", "write_file", "file_editor"),
    ReadFile: ("Read", "read", "read_file", "file_editor"),
    EditFile: ("Edit", "edit", "file_editor"),
}
_EDITOR_COMMANDS: dict[type[Action], str] = {
    WriteFile: "create",
    ReadFile: "view",
    EditFile: "str_replace",
}
TERMINUS = '"keystrokes"'
"""What only terminus-2's prompt has: its format is plain text."""
KEYS_S = 4.0
"""Seconds that terminus-2 waits for what its keys do, before it reads the screen."""


class Player:
    """Answers the prompts of one trial; `root` is the folder that paths of files begin with."""

    def __init__(self, trial: VariedTrial, root: str, fail: Callable[[Fault], None]) -> None:
        """`fail` lets the next call fail; it is called while the step before is answered."""
        self._trial = trial
        self._root = root
        self._fail = fail

    def __call__(self, prompt: str) -> str:
        steps, done = self._trial.steps, steps_done(prompt)
        if done + 1 < len(steps) and (fault := steps[done + 1].fault):
            self._fail(fault)
        terminus, tools = TERMINUS in prompt, offered_tools(prompt)
        if terminus:
            actions = steps[done].actions if done < len(steps) else ()
            return self._keys(done, actions)
        shell = next((name for name in tools if name in SHELLS), None)
        if shell is None:
            return DONE
        if done < len(steps):
            calls = [self._call(action, shell, tools) for action in steps[done].actions]
            return "\n".join([self._said(done), *calls])
        end = next((name for name in tools if name in ENDS), None)
        if end is not None:
            return call(end, ENDS[end])
        return shell_call(shell, SUBMIT, tools) if SUBMIT in prompt else DONE

    def _said(self, done: int) -> str:
        return f"Step {done + 1} of {len(self._trial.steps)}."

    def _call(self, action: Action, shell: str, tools: dict[str, Any]) -> str:
        name = next((name for name in _FILE_TOOLS[type(action)] if name in tools), None)
        if name is None:
            return shell_call(shell, action.command, tools)
        taken = tools[name]["parameters"]["properties"]
        return call(name, {key: v for key, v in self._file(action).items() if key in taken})

    def _file(self, action: Action) -> dict[str, str]:
        """The arguments of a file tool, under each name that some agent has for them."""
        assert not isinstance(action, Shell)
        path = f"{self._root}{action.path}"
        found = dict.fromkeys(("file_path", "filePath", "path"), path)
        if isinstance(action, WriteFile):
            found |= {"content": action.text, "file_text": action.text}
        if isinstance(action, EditFile):
            found |= dict.fromkeys(("old_string", "oldString", "old_str"), action.old)
            found |= dict.fromkeys(("new_string", "newString", "new_str"), action.new)
        editor = {"command": _EDITOR_COMMANDS[type(action)], "security_risk": "LOW"}
        return found | editor

    def _keys(self, done: int, actions: tuple[Action, ...]) -> str:
        said = self._said(done) if actions else DONE
        keys = [{"keystrokes": f"{action.command}\n", "duration": KEYS_S} for action in actions]
        answer = {"analysis": said, "plan": "p", "commands": keys, "task_complete": not actions}
        return json.dumps(answer, ensure_ascii=False)


def steps_done(prompt: str) -> int:
    """Number of steps that the prompt has results of."""
    found = [*_STEP.finditer(prompt)]
    if not found:
        return 0
    last = found[-1]
    rest = prompt[last.end() :]
    return int(last[1]) - (not any(mark in rest for mark in _RESULTS))
