"""Code execution, which the proxy runs by a backend of the user in the provider's place.

    tools: {code_execution: my_package.sandbox:run}

The model sees a function `code_execution` for Python and, with Messages' tools of 2025-08-25 or
later, `bash_code_execution`. The agent gets the forms of its dialect: `server_tool_use` and
`code_execution_tool_result` or `bash_code_execution_tool_result` (Messages),
`code_interpreter_call` (Responses), `executableCode` and `codeExecutionResult` (generateContent).
Invariant: as for searches, the text that the model sees for a result can be read from what the
agent sends back (Messages), or is looked up in the record.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import orjson

from proxy.conversation.messages import ToolCall, arguments_object
from proxy.rendering.deltas import ResultDelta
from proxy.wire.fields import Fields

JsonObject = dict[str, Any]
Language = Literal["python", "bash"]
CODE = "code_execution"
"""The name of the function that runs Python, and of the setting in `tools`."""
BASH = "bash_code_execution"
UNAVAILABLE = "code execution is unavailable"
NO_CODE = "code execution needs code"
TOO_MANY = "code cannot be executed again in this answer"
TIMED_OUT = "the code took too long"
_ERRORS = {
    UNAVAILABLE: "unavailable",
    NO_CODE: "invalid_tool_input",
    TOO_MANY: "too_many_requests",
    TIMED_OUT: "execution_time_exceeded",
}
"""Texts that the model sees for an error: Anthropic's codes."""
MAX_OUTPUT_CHARS = 30_000
"""Characters of standard output, and of standard error; of more, the middle is left out."""
GOOGLES = "codeExecution"
"""The name of generateContent's tool."""
_PYTHON_ONLY = "code_execution_20250522"
LANGUAGES: dict[str, Language] = {CODE: "python", BASH: "bash"}
_FIELDS = {CODE: "code", BASH: "command"}
_CONTAINER = "cntr_agentic_proxy"
"""The container that an item names if the agent named none."""


class Execution(NamedTuple):
    """What a backend runs."""

    language: Language
    code: str
    session_id: str
    """All calls with the same one may share files and state."""
    call: str
    """Names the call within the session. After a crash of the proxy, a call whose result was not
    recorded is run again, with the same name."""


def is_code_execution(kind: Any) -> bool:
    """Example: `code_execution_20250825`, `code_interpreter`"""
    return isinstance(kind, str) and (kind.startswith(CODE) or kind == "code_interpreter")


def code_functions(kind: str) -> list[JsonObject]:
    """The functions for the model of a tool of this kind."""
    python = _function(CODE, "Runs Python code", "The Python code.")
    if kind in (_PYTHON_ONLY, "code_interpreter", GOOGLES):
        return [python]
    return [python, _function(BASH, "Runs a bash command", "The command.")]


def _function(name: str, does: str, words: str) -> JsonObject:
    field = _FIELDS[name]
    return {
        "name": name,
        "description": f"{does}. Returns standard output, standard error and the exit code.",
        "parameters": {
            "type": "object",
            "properties": {field: {"type": "string", "description": words}},
            "required": [field],
        },
    }


def code_of(call: ToolCall) -> str:
    """The code of a call; empty if it has none."""
    code = arguments_object(call).get(_FIELDS[call.name])
    return code if isinstance(code, str) else ""


def executed_text(done: Mapping[str, Any]) -> str:
    """What the model sees of `stdout`, `stderr` and `return_code`. Raises TypeError for values of
    other types."""
    stdout, stderr = done.get("stdout", ""), done.get("stderr", "")
    code = done.get("return_code", 0)
    if not isinstance(stdout, str) or not isinstance(stderr, str) or type(code) is not int:
        raise TypeError(
            "stdout and stderr of a result must be strings and return_code an integer, got "
            f"{type(stdout).__name__}, {type(stderr).__name__} and {type(code).__name__}"
        )
    return _text(_shortened(stdout), _shortened(stderr), code)


def _text(stdout: str, stderr: str, code: int) -> str:
    return orjson.dumps({"stdout": stdout, "stderr": stderr, "return_code": code}).decode()


def _shortened(text: str) -> str:
    text = text.encode("utf-8", "replace").decode()
    missing, half = len(text) - MAX_OUTPUT_CHARS, MAX_OUTPUT_CHARS // 2
    if missing <= 0:
        return text
    return f"{text[:half]}\n[{missing} characters are left out]\n{text[-half:]}"


def is_error(text: str) -> bool:
    return text in _ERRORS


# ---------------------------------------------------------------------------- Messages

RESULT_BLOCKS = {f"{name}_tool_result": name for name in (CODE, BASH)}
"""Types of blocks with results, and the functions that were called."""


def result_block(result: ResultDelta) -> JsonObject:
    """The block of a result."""
    name = result.call.name
    kind = f"{name}_tool_result"
    code = _ERRORS.get(result.text)
    content: JsonObject
    if code is not None:
        content = {"type": f"{kind}_error", "error_code": code}
    else:
        content = {"type": f"{name}_result", **orjson.loads(result.text), "content": []}
    return {"type": kind, "tool_use_id": result.call.id, "content": content}


def block_result(block: Fields) -> str:
    """The text of a result that comes back. What another provider has encrypted is left out."""
    content = next(iter(block.quoted_objects("content")), Fields({}))
    error = content.get("error_code")
    if error is not None or not content.data:
        return next((text for text, code in _ERRORS.items() if code == error), UNAVAILABLE)
    code = content.get("return_code")
    is_code = type(code) is int and abs(code) < 2**63
    return _text(content.quoted("stdout"), content.quoted("stderr"), code if is_code else 0)


# --------------------------------------------------------------------------- Responses


class CodeItem(NamedTuple):
    """A `code_interpreter_call`, or an `executableCode` and its result, that comes back."""

    call: ToolCall
    turn: int | None
    """The turn that made the call; None: the item has no id of ours."""
    failed: bool
    logs: str | None
    """Its output; None: the agent did not ask for it."""
    return_code: int = 0
    """0 also where the dialect does not say."""

    def text(self) -> str:
        """What the model sees if the result is not in the record."""
        if self.failed:
            return UNAVAILABLE
        logs = self.logs or "[the output is not in the record]"
        return _text(logs, "", self.return_code)

    def is_of(self, call: ToolCall, result: str) -> bool:
        """Whether this is the item of a recorded call and its result."""
        return (
            call.name == CODE
            and code_of(call) == code_of(self.call)
            and is_error(result) == self.failed
            and (self.logs is None or self.failed or _logs(result) == self.logs)
        )


def code_item(
    result: ResultDelta, turn: int, tool: Mapping[str, Any], *, with_outputs: bool
) -> JsonObject:
    """The item of a call whose result is known."""
    failed, container = is_error(result.text), tool.get("container")
    logs = "" if failed else _logs(result.text)
    outputs = [{"type": "logs", "logs": logs}] if logs else []
    return {
        "id": f"ci_{turn}_{result.call.id}",
        "type": "code_interpreter_call",
        "status": "failed" if failed else "completed",
        "code": code_of(result.call),
        "container_id": container if isinstance(container, str) else _CONTAINER,
        "outputs": outputs if with_outputs else None,
    }


def item_code(item: Fields, call_id: str) -> CodeItem:
    """The call of an item, or of an `executableCode`, that comes back. `call_id` is for a client
    that sends no ids of items."""
    own = _ITEM_ID.fullmatch(item.quoted("id"))
    arguments = orjson.dumps({"code": item.quoted("code")}).decode()
    call = ToolCall(own["call_id"] if own else call_id, CODE, arguments)
    logs = None
    if isinstance(item.get("outputs"), list):
        logs = "".join(each.quoted("logs") for each in item.quoted_objects("outputs"))
    failed = item.get("status") == "failed"
    return CodeItem(call, int(own["turn"]) if own else None, failed, logs)


_ITEM_ID = re.compile(r"ci_(?P<turn>[0-9]{1,9})_(?P<call_id>.+)", re.DOTALL)


# --------------------------------------------------------------------- generateContent

_OUTCOMES = {TIMED_OUT: "OUTCOME_DEADLINE_EXCEEDED"}


def code_part(call: ToolCall, turn: int) -> JsonObject:
    """The part of a call."""
    said = {"id": f"ci_{turn}_{call.id}", "language": "PYTHON", "code": code_of(call)}
    return {"executableCode": said}


def result_part(result: ResultDelta, turn: int) -> JsonObject:
    """The part of a result."""
    if is_error(result.text):
        outcome, output = _OUTCOMES.get(result.text, "OUTCOME_FAILED"), result.text
    else:
        failed = orjson.loads(result.text)["return_code"] != 0
        outcome, output = "OUTCOME_FAILED" if failed else "OUTCOME_OK", _logs(result.text)
    said = {"id": f"ci_{turn}_{result.call.id}", "outcome": outcome, "output": output}
    return {"codeExecutionResult": said}


def part_result(part: Fields, item: CodeItem) -> tuple[CodeItem, str]:
    """The item with its `codeExecutionResult`, and the text of an error; empty for another result,
    which the record has."""
    output, ran_well = part.quoted("output"), part.get("outcome") == "OUTCOME_OK"
    if not ran_well and is_error(output):
        return item._replace(failed=True), output
    return item._replace(logs=output, return_code=0 if ran_well else 1), ""


def _logs(text: str) -> str:
    done = orjson.loads(text)
    return str(done["stdout"] + done["stderr"])
