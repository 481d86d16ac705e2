"""Tools that an API knows by their type alone: who runs them, and what the model is told.

Those that the client runs are functions for the model, with their published schemas, and a call
comes back in the dialect's own form. Those that only a provider can run are left out of the prompt.
Invariant: every tool type of the official SDKs is in one of the tables (`tests` read the types).

Sources: docs.anthropic.com (bash, text editor, memory, computer use), platform.openai.com (local
shell, shell, apply patch, tool search, computer use).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import orjson

from proxy.conversation import ToolCall, parsed_arguments

JsonObject = dict[str, Any]


def _schema(required: str, **properties: Any) -> JsonObject:
    names = required.split()
    return {
        "type": "object",
        "properties": properties,
        "required": names,
        "additionalProperties": False,
    }


def _text(words: str = "") -> JsonObject:
    return {"type": "string", "description": words} if words else {"type": "string"}


def _whole(words: str = "") -> JsonObject:
    return {"type": "integer", "description": words} if words else {"type": "integer"}


def _one_of(*values: str) -> JsonObject:
    return {"type": "string", "enum": [*values]}


_TEXTS = {"type": "array", "items": {"type": "string"}}
_PAIR = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}

# ---------------------------------------------------------------------------- Messages

_BASH = _schema(
    "",
    command=_text("The bash command to run. Required unless the tool is being restarted."),
    restart={"type": "boolean", "description": "True restarts the tool."},
)
_EDITOR = {
    "path": _text("Absolute path to a file or folder."),
    "file_text": _text("Of `create`: the content of the file."),
    "old_str": _text("Of `str_replace`: the text to replace, which occurs exactly once."),
    "new_str": _text("The new text of `str_replace`."),
    "insert_line": _whole("Of `insert`: the line after which the text is inserted, 0 for first."),
    "view_range": {**_PAIR, "description": "Of `view`: first and last line, -1 for the end."},
}
_EDIT_COMMANDS = ("view", "create", "str_replace", "insert")
_OLD_EDITOR = _schema("command path", command=_one_of(*_EDIT_COMMANDS, "undo_edit"), **_EDITOR)
_NEW_EDITOR = _schema(
    "command path",
    command=_one_of(*_EDIT_COMMANDS),
    **_EDITOR,
    insert_text=_text("Of `insert`: the text to insert."),
)
_MEMORY = _schema(
    "command",
    command=_one_of(*_EDIT_COMMANDS, "delete", "rename"),
    **_EDITOR,
    insert_text=_text("Of `insert`: the text to insert."),
    old_path=_text("Of `rename`."),
    new_path=_text("Of `rename`."),
)
_ACTIONS = (
    *("key", "type", "mouse_move", "left_click", "left_click_drag", "right_click"),
    *("middle_click", "double_click", "triple_click", "screenshot", "cursor_position"),
    *("left_mouse_down", "left_mouse_up", "scroll", "hold_key", "wait"),
)
_COMPUTER = _schema(
    "action",
    action=_one_of(*_ACTIONS, "zoom"),
    coordinate={**_PAIR, "description": "x and y in pixels."},
    start_coordinate={**_PAIR, "description": "Of `left_click_drag`."},
    text=_text("Of `type`, `key`, `hold_key`; a key held down during a click or scroll."),
    scroll_direction=_one_of("up", "down", "left", "right"),
    scroll_amount=_whole(),
    duration={"type": "number", "description": "Seconds, of `hold_key` and `wait`."},
    region={"type": "array", "items": {"type": "integer"}, "description": "Of `zoom`."},
)
_MESSAGES: dict[str, tuple[str, JsonObject]] = {
    "bash": ("Runs commands in a bash session, which persists between calls.", _BASH),
    "text_editor": ("Views, creates and edits files.", _NEW_EDITOR),
    "memory": ("Keeps notes in files under /memories, which outlive the conversation.", _MEMORY),
    "computer": ("Uses the mouse, the keyboard and the screen of a computer.", _COMPUTER),
}
"""Tools that the client runs, by the family of their type: description and schema."""
_OLD_EDITORS = ("text_editor_20241022", "text_editor_20250124")
MESSAGES_PROVIDER = frozenset(
    (
        *("web_search", "web_fetch", "code_execution", "tool_search_tool_bm25"),
        *(
            "tool_search_tool_regex",
            "mcp_toolset",
            "advisor",
            "computer_toolset",
            "browser_toolset",
        ),
    )
)
"""Families that are left out: run by the provider, or with schemas that it does not publish."""


def family(kind: str) -> str:
    """The family of a tool type of Messages. Example: `bash_20250124` → `bash`"""
    return re.sub(r"_20\d{6}$", "", kind)


def messages_function(kind: str, name: str, more: JsonObject) -> JsonObject | None:
    """The function for a typed tool that the client runs, or None. `more` is the tool's entry."""
    known = _MESSAGES.get(family(kind))
    if known is None:
        return None
    words, schema = known
    if kind in _OLD_EDITORS:
        schema = _OLD_EDITOR
    if "display_width_px" in more and "display_height_px" in more:
        size = f"{more['display_width_px']} x {more['display_height_px']}"
        words = f"{words} The screen has {size} pixels."
    return {"name": name, "description": words, "parameters": schema}


# --------------------------------------------------------------------------- Responses

_LOCAL_SHELL = _schema(
    "command",
    command={**_TEXTS, "description": 'The command and its arguments: ["ls", "-l"]'},
    timeout_ms=_whole(),
    working_directory=_text(),
    env={"type": "object", "additionalProperties": {"type": "string"}, "default": {}},
    user=_text(),
)
_SHELL = _schema(
    "commands",
    commands={**_TEXTS, "description": "Shell commands to run, each in a shell of its own."},
    timeout_ms=_whole(),
    max_output_length=_whole(),
)
_APPLY_PATCH = _schema(
    "type path",
    type=_one_of("create_file", "update_file", "delete_file"),
    path=_text(),
    diff=_text("A diff in the V4A format; none for `delete_file`."),
)
_COMPUTER_ACTION = {
    "type": "object",
    "properties": {
        "type": _one_of(
            *("click", "double_click", "drag", "keypress", "move", "screenshot", "scroll"),
            *("type", "wait"),
        ),
        "x": _whole(),
        "y": _whole(),
        "button": _one_of("left", "right", "wheel", "back", "forward"),
        "keys": _TEXTS,
        "text": _text(),
        "scroll_x": _whole(),
        "scroll_y": _whole(),
        "path": {"type": "array", "items": {"type": "object"}},
    },
    "required": ["type"],
}
_SEARCH = _schema("query", query=_text("What the tool has to do."), limit=_whole())


class ClientTool(NamedTuple):
    """A tool of Responses that the client runs, and whose calls have an item type of their own."""

    words: str
    schema: JsonObject
    item: str
    """The type of the call's item; that of its output is `{item}_output`."""
    field: str
    """The item's field that holds the arguments."""
    wraps: Callable[[JsonObject], JsonObject | None]
    """From the arguments to that field; None for arguments that it cannot hold."""
    fixed: Mapping[str, Any] = MappingProxyType({})
    """What else the item has."""
    added: Mapping[str, Any] = MappingProxyType({})
    """What the field has besides the arguments."""


def _has_texts(name: str) -> Callable[[JsonObject], JsonObject | None]:
    def wraps(arguments: JsonObject) -> JsonObject | None:
        values = arguments.get(name)
        is_right = isinstance(values, list) and all(isinstance(each, str) for each in values)
        return arguments if is_right else None

    return wraps


def _has_types(arguments: JsonObject) -> JsonObject | None:
    return arguments if isinstance(arguments.get("type"), str) else None


CLIENT_TOOLS: dict[str, ClientTool] = {
    "local_shell": ClientTool(
        "Runs a command on the user's machine.",
        _LOCAL_SHELL,
        "local_shell_call",
        "action",
        _has_texts("command"),
        added={"type": "exec", "env": {}},
    ),
    "shell": ClientTool(
        "Runs shell commands on the user's machine.",
        _SHELL,
        "shell_call",
        "action",
        _has_texts("commands"),
    ),
    "apply_patch": ClientTool(
        "Creates, changes or deletes one file.",
        _APPLY_PATCH,
        "apply_patch_call",
        "operation",
        _has_types,
    ),
    "tool_search": ClientTool(
        "Finds tools that are not listed here; they can be called afterwards.",
        _SEARCH,
        "tool_search_call",
        "arguments",
        lambda arguments: arguments,
        fixed={"execution": "client"},
    ),
    "computer": ClientTool(
        "Uses the mouse, the keyboard and the screen of a computer.",
        _COMPUTER_ACTION,
        "computer_call",
        "action",
        _has_types,
        fixed={"pending_safety_checks": []},
    ),
}
"""By the type of the tool, which is also the name of the function for the model."""
CLIENT_ITEMS = {tool.item: name for name, tool in CLIENT_TOOLS.items()}
_ALIASES = {"computer_use_preview": "computer"}
RESPONSES_PROVIDER = frozenset(
    (
        *(
            "web_search",
            "web_search_2025_08_26",
            "web_search_preview",
            "web_search_preview_2025_03_11",
        ),
        *(
            "file_search",
            "code_interpreter",
            "image_generation",
            "mcp",
            "programmatic_tool_calling",
        ),
    )
)
"""Tool types of Responses that only a provider can run; they are left out."""


def responses_function(kind: str, tool: JsonObject) -> tuple[str, JsonObject] | None:
    """Kind and function of a typed tool that the client runs; None for any other."""
    name = _ALIASES.get(kind, kind)
    known = CLIENT_TOOLS.get(name)
    environment, execution = tool.get("environment"), tool.get("execution")
    hosted = isinstance(environment, dict) and str(environment.get("type")).startswith("container")
    if known is None or hosted or execution == "server":
        return None
    words, schema = tool.get("description"), tool.get("parameters")
    function = {
        "name": name,
        "description": words if isinstance(words, str) else known.words,
        "parameters": schema if isinstance(schema, dict) else known.schema,
    }
    return name, function


def client_item(kind: str, call: ToolCall) -> JsonObject | None:
    """Type and content of a call's item, without ids. None if the arguments do not fit in it."""
    tool, arguments = CLIENT_TOOLS[kind], parsed_arguments(call.arguments)
    held = tool.wraps(arguments) if isinstance(arguments, dict) else None
    if held is None:
        return None
    return {"type": tool.item, tool.field: {**tool.added, **held}, **tool.fixed}


def item_arguments(kind: str, item: JsonObject) -> str:
    """The arguments of the call in an item of this kind, as JSON."""
    tool = CLIENT_TOOLS[kind]
    held = item.get(tool.field)
    if not isinstance(held, dict):
        return orjson.dumps(held if held is not None else {}).decode()
    kept = {
        key: value
        for key, value in held.items()
        if value is not None and tool.added.get(key, ...) != value
    }
    return orjson.dumps(kept).decode()
