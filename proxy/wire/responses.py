"""OpenAI Responses: `POST /v1/responses`.

Input items become messages; the reasoning, text and calls of one turn become one assistant message.
Tools become functions: those of a namespace are named `namespace.name`, a free-form tool takes one
string `input`, and tools that the provider itself would run are left out. `previous_response_id`
names the recorded turn that the new input continues. For a compaction the model writes a summary,
which later requests bring back in an item of its own.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import orjson

from proxy.conversation.free_form import FREE_FORM, free_arguments
from proxy.conversation.images import joined_blocks
from proxy.conversation.messages import (
    Conversation,
    Message,
    Role,
    ToolCall,
    missing_call_id,
)
from proxy.conversation.references import AnswerPart, ReferringConversation
from proxy.errors import ProxyError, RequestError
from proxy.wire.chat import MAX_TOP_LOGPROBS, json_object, openai_error, parse_content
from proxy.wire.client_tools import CLIENT_ITEMS, item_arguments, responses_function
from proxy.wire.dialect import Call, ForcedCall, Headers, Options, Outcome, read_sampling
from proxy.wire.fields import Fields, only_provider_tools
from proxy.wire.known_fields import unknown_fields
from proxy.wire.provided import (
    CALL_ITEMS,
    UNNAMED,
    PastCall,
    name_of,
    offered_functions,
    past_call,
    provider_tools,
)
from proxy.wire.responses_stream import (
    SUMMARY_MARK,
    ResponsesWriter,
    answer_part,
    output_items,
    response_object,
)
from proxy.wire.shown import block_text, shown

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
SUMMARY_HEAD = "Summary of the earlier part of this conversation:\n"
COMPACT = (
    "Summarise the conversation so far for yourself: you will go on with the task with this "
    "summary alone. Say what was asked, what was done and found, and what remains to be done."
)
"""What the model is asked for a compaction, if the agent gives no instructions of its own."""
READING_CALLS = frozenset(
    (
        *("file_search_call", "web_search_call", "code_interpreter_call", "image_generation_call"),
        *("mcp_list_tools", "mcp_approval_request", "mcp_call", "program"),
    )
)
"""Items of what the provider's tools have done in an answer: shown as the assistant's text."""
OTHER_ITEMS = frozenset(("program_output", "mcp_approval_response", "configuration_update"))
"""Items that are shown as the user's text, like those of unknown types."""


class ResponsesDialect:
    """The dialect of `/v1/responses`."""

    name = "responses"
    route = "responses"

    def parse(self, fields: Fields, headers: Headers) -> Call:
        tools, deferred, kinds, provided = offered_tools(fields)
        past: list[PastCall] = []
        items = parse_input(fields, provided, past)
        compacting = _takes_trigger(fields)
        instructions = fields.optional_text("instructions")
        if instructions:
            items.insert(0, Message("system", instructions))
        if not items:
            raise fields.refuse("input", "at least one item")
        conversation = Conversation([], tools, deferred=deferred)
        previous = fields.optional_text("previous_response_id")
        if previous is not None:
            conversation.continues = turn_of(previous)
        referring = ReferringConversation(conversation, items)
        if not referring.turns:
            referring.resolve({})
        options = _options(fields, kinds)
        if compacting:
            options.tool_calls, options.forced = False, None
        return Call(
            referring=referring if referring.turns else None,
            model=fields.text("model", ""),
            conversation=conversation,
            options=options,
            stream=fields.flag("stream"),
            provider_tools=provided,
            past_calls=past,
            free_form=frozenset(n for n, kind in kinds.items() if kind.startswith("custom")),
            extra={
                "kinds": kinds,
                "previous": previous,
                "created": int(time.time()),
                "compacting": compacting,
                "outputs": "code_interpreter_call.outputs" in fields.items("include"),
            },
            unknown=unknown_fields(fields, ResponsesDialect.name),
        )

    def whole(self, call: Call, answer_id: str, outcomes: Sequence[Outcome]) -> bytes:
        outcome = outcomes[0]
        return orjson.dumps(response_object(call, outcome, output_items(call, answer_id, outcome)))

    def writer(self, call: Call, answer_id: str) -> ResponsesWriter:
        return ResponsesWriter(call, answer_id)

    def error(self, error: ProxyError) -> bytes:
        return openai_error(error)


class CompactDialect(ResponsesDialect):
    """The dialect of `/v1/responses/compact`: the same, and the answer is a summary."""

    name = "responses"
    route = "responses/compact"

    def parse(self, fields: Fields, headers: Headers) -> Call:
        if isinstance(fields.get("input"), str):
            fields.data["input"] = [{"role": "user", "content": fields.text("input")}]
        items = fields.items("input")
        fields.data["input"] = [*items, {"type": "compaction_trigger"}]
        call = super().parse(fields, headers)
        call.stream = False
        call.extra["kept"] = [{"type": "message", **it} for it in items if _is_user_message(it)]
        return call

    def whole(self, call: Call, answer_id: str, outcomes: Sequence[Outcome]) -> bytes:
        items = [*call.extra["kept"], *output_items(call, answer_id, outcomes[0])]
        response = response_object(call, outcomes[0], items)
        kept = {name: response[name] for name in ("id", "created_at", "output", "usage")}
        return orjson.dumps({**kept, "object": "response.compaction"})


def _is_user_message(item: Any) -> bool:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    return kind == "message" and item.get("role") == "user"


def parse_input(
    fields: Fields, provided: Collection[str] = (), past: list[PastCall] | None = None
) -> list[Message | AnswerPart]:
    """The messages of the input. An item that the model cannot take is shown as text. Items of
    `provided` functions, which the proxy runs, are calls, and are added to `past`."""
    if isinstance(fields.get("input"), str):
        return [Message("user", fields.text("input"))]
    found: list[Message | AnswerPart | None] = []
    with_others = set[str]()
    for number, item in enumerate(fields.objects("input")):
        kind = item.get("type")
        if past is not None and isinstance(kind, str) and CALL_ITEMS.get(kind) in provided:
            among = missing_call_id(_same_answer(found, with_others))
            each = past_call(item, among or f"{UNNAMED}{number}")
            if among is not None:
                with_others.add(each.call.id)
            found += [Message("assistant", tool_calls=[each.call]), each.result]
            past.append(each)
        else:
            found.append(_parse_item(item))
    return [message for message in found if message is not None]


def _same_answer(
    found: Sequence[Message | AnswerPart | None], past: Collection[str]
) -> list[ToolCall]:
    """The calls before one that the proxy has run which are of the same answer: its item follows
    those of the agent's own calls, also where it came first. `past`: the ids of such calls."""
    calls: list[ToolCall] = []
    for message in reversed(found):
        if not isinstance(message, Message):
            break
        if message.role == "assistant":
            calls += message.tool_calls
        elif message.role != "tool" or message.tool_call_id not in past:
            break
    return calls


def _takes_trigger(fields: Fields) -> bool:
    items = fields.get("input")
    last = items[-1] if isinstance(items, list) and items else None
    return isinstance(last, dict) and last.get("type") == "compaction_trigger"


def offered_tools(
    fields: Fields,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, str], dict[str, dict[str, Any]]]:
    """See `parse_tools`: the tools of the request and of its items, those that a tool search has
    found, the kinds of all, and those that the proxy runs itself. With `tool_choice.allowed_tools`
    only these are offered.

    Raises RequestError if there are only tools that nobody runs here."""
    tools, found = fields.objects("tools"), list[Fields]()
    for at, item in enumerate(fields.items("input") if _is_list(fields.get("input")) else ()):
        kind = item.get("type") if isinstance(item, dict) else None
        if kind in ("additional_tools", "tool_search_output"):
            inner = Fields(item, fields, "input", at).objects("tools")
            (tools if kind == "additional_tools" else found).extend(inner)
    functions, kinds = parse_tools(tools)
    deferred, more = parse_tools(found)
    kinds = {**more, **kinds}
    if tools and not functions:
        raise only_provider_tools(fields)
    choice = fields.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        named = fields.child("tool_choice").objects("tools")
        allowed = {each.text("name", "") or each.text("type", "") for each in named}
        functions = [each for each in functions if each["function"]["name"] in allowed]
    return functions, deferred, kinds, provider_tools([tool.data for tool in tools])


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def parse_tools(tools: list[Fields]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The functions for the model, and, by name, the kind of those that are not plain functions on
    the wire: `custom`, `namespace:NAME`, or one of `CLIENT_TOOLS`. Of several tools with one name
    the first one counts."""
    functions: dict[str, dict[str, Any]] = {}
    kinds: dict[str, str] = {}
    for tool in tools:
        kind = tool.text("type", "function")
        if kind == "namespace":
            space = tool.text("name")
            inner, inner_kinds = parse_tools(tool.objects("tools"))
            for entry in inner:
                own = entry["function"]["name"]
                name = f"{space}.{own}"
                if name not in functions:
                    entry["function"]["name"] = name
                    functions[name] = entry
                    kinds[name] = f"namespace:{space}"
                    if inner_kinds.get(own) == "custom":
                        kinds[name] = f"custom:{space}"
        elif kind in ("function", "custom"):
            entry = _function(tool, free_form=kind == "custom")
            name = entry["function"]["name"]
            if name not in functions:
                functions[name] = entry
                if kind == "custom":
                    kinds[name] = "custom"
        elif (known := responses_function(kind, tool.data)) is not None:
            name, function = known
            if name not in functions:
                functions[name] = {"type": "function", "function": function}
                kinds[name] = name
        elif offered := offered_functions(kind, tool.backends):
            for function in offered:
                functions.setdefault(function["name"], {"type": "function", "function": function})
        else:
            tool.note("tools_left_out", kind)
    return list(functions.values()), kinds


def turn_of(response_id: str) -> int:
    """The index of the turn that a response id names. Raises RequestError (404)."""
    head, _, rest = response_id.partition("_")
    index = rest.partition("_")[0]
    if head != "resp" or not index.isdigit() or len(index) > 9:
        raise RequestError(
            f"previous_response_id: {response_id[:80]!r} is not a response of this session",
            param="previous_response_id",
            status=404,
        )
    return int(index)


def _parse_item(item: Fields) -> Message | AnswerPart | None:
    """None for an item that says nothing to the model."""
    kind = item.text("type", "item_reference" if item.data.keys() == {"id"} else "message")
    if kind == "message":
        role = _ROLES.get(item.text("role"))
        if role is None:
            raise item.refuse("role", f"one of {', '.join(_ROLES)}")
        return Message(role, parse_content(item, "content"))
    if kind in ("function_call", "custom_tool_call"):
        name, space = item.text("name"), item.optional_text("namespace")
        name = f"{space}.{name}" if space else name
        is_free_form = kind == "custom_tool_call"
        text = free_arguments(item.text("input", "")) if is_free_form else _json_text(item)
        return Message("assistant", tool_calls=[ToolCall(item.text("call_id", ""), name, text)])
    if kind in CLIENT_ITEMS:
        name = CLIENT_ITEMS[kind]
        call_id = item.optional_text("call_id") or item.text("id", "")
        call = ToolCall(call_id, name, item_arguments(name, item.data))
        return Message("assistant", tool_calls=[call])
    if kind in _OUTPUTS:
        call_id = item.optional_text("call_id") or item.text("id", "")
        return Message("tool", _output(item), tool_call_id=call_id)
    if kind == "reasoning":
        return Message("assistant", reasoning=_reasoning(item) or None)
    if kind == "item_reference":
        return answer_part(item.text("id"))
    if kind == "compaction_trigger":
        return Message("user", COMPACT)
    if kind in ("compaction", "compaction_summary", "context_compaction"):
        return _compacted(item, kind)
    if kind == "agent_message":
        return Message("user", _agent_message(item))
    if kind in ("additional_tools", "ghost_snapshot"):
        return None
    text = shown(kind, item.data)
    item.note("shown_as_text", kind, text)
    return Message("assistant" if kind in READING_CALLS else "user", text)


_OUTPUTS = frozenset(
    (
        "function_call_output",
        "custom_tool_call_output",
        *(f"{item}_output" for item in CLIENT_ITEMS if item != "tool_search_call"),
        "tool_search_output",
    )
)


def _compacted(item: Fields, kind: str) -> Message:
    """What stands for an earlier part of the conversation: our own summary, or a note that another
    provider's cannot be read."""
    content = item.get("encrypted_content")
    if isinstance(content, str) and content.startswith(SUMMARY_MARK):
        text = SUMMARY_HEAD + content.removeprefix(SUMMARY_MARK)
    else:
        text = f"[{kind}: an earlier part of the conversation, which cannot be read here]"
        item.note("shown_as_text", kind, text)
    return Message("user", text, compacted=True)


def _agent_message(item: Fields) -> str:
    """A message of another agent. What was to be encrypted is what this proxy has sent as text."""
    texts = []
    for part in item.objects("content"):
        is_secret = part.get("type") == "encrypted_content"
        texts.append(part.quoted("encrypted_content") if is_secret else block_text(part))
    author = item.quoted("author")
    return (f"Message from {author}:\n" if author else "") + joined_blocks(texts)


def _json_text(item: Fields) -> str:
    arguments = item.get("arguments")
    return arguments if isinstance(arguments, str) else orjson.dumps(arguments or {}).decode()


def _output(item: Fields) -> str:
    """The text of a tool's output, which is text, content, or JSON of a tool's own form."""
    if item.get("type") == "tool_search_output":
        found, _ = parse_tools(item.objects("tools"))
        return "\n".join(orjson.dumps(tool["function"]).decode() for tool in found)
    output = item.get("output")
    if isinstance(output, dict) and isinstance(output.get("type"), str):
        return block_text(item.child("output"))
    if isinstance(output, dict | int | float | bool):
        return orjson.dumps(output).decode()
    if item.get("type") == "shell_call_output" and isinstance(output, list):
        return "\n".join(map(_shell_output, item.objects("output")))
    text = parse_content(item, "output")
    failed = item.get("type") == "apply_patch_call_output" and not text
    return item.text("status", "") if failed else text


def _shell_output(part: Fields) -> str:
    outcome = part.child("outcome")
    code = outcome.get("exit_code")
    end = f"exit code {code}" if isinstance(code, int) else outcome.text("type", "")
    texts = [part.text("stdout", ""), part.text("stderr", ""), f"[{end}]" if end else ""]
    return "\n".join(text for text in texts if text)


def _reasoning(item: Fields) -> str:
    parts = [*item.items("content"), *item.items("summary")]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return "\n".join(text for text in texts if isinstance(text, str))


def _function(tool: Fields, *, free_form: bool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.text("name")}
    if tool.get("description") is not None:
        function["description"] = tool.text("description")
    function["parameters"] = FREE_FORM if free_form else tool.child("parameters").data
    return {"type": "function", "function": function}


def _options(fields: Fields, kinds: Mapping[str, str]) -> Options:
    top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS) or 0
    wants = "message.output_text.logprobs" in fields.items("include")
    options = read_sampling(fields)
    options.max_tokens = fields.integer("max_output_tokens", 1, 2**31)
    options.stop = fields.stops("stop")
    options.logprobs, options.top_logprobs = wants, top if wants else 0
    options.structured = _structured(fields.child("text").child("format"))
    options.tool_calls = _choice(fields) != "none"
    options.forced = _forced(fields, kinds)
    options.parallel_calls = fields.flag("parallel_tool_calls", True)
    return options


def _choice(fields: Fields) -> str:
    """`tool_choice` as a word: of an object its type, or the mode of a list of allowed tools."""
    choice = fields.get("tool_choice")
    if not isinstance(choice, dict):
        return fields.text("tool_choice", "auto")
    named = fields.child("tool_choice")
    kind = named.text("type")
    return named.text("mode", "auto") if kind == "allowed_tools" else kind


def _forced(fields: Fields, kinds: Mapping[str, str]) -> ForcedCall | None:
    kind = _choice(fields)
    if kind in ("auto", "none"):
        return None
    if kind in ("required", "any"):
        return ForcedCall()
    if kind in ("function", "custom"):
        return ForcedCall(fields.child("tool_choice").text("name"))
    if kind in kinds:  # a tool that is named by its type
        return ForcedCall(kind)
    if (name := name_of(kind)) in fields.backends:
        return ForcedCall(name)
    raise fields.refuse("tool_choice", "auto, none, required or a tool that the agent runs")


def _structured(fields: Fields) -> dict[str, Any] | None:
    kind = fields.text("type", "text")
    if kind == "json_schema":
        schema = fields.get("schema")
        if not isinstance(schema, dict):
            raise fields.refuse("schema", "a JSON schema")
        return {"json": schema}
    if kind == "json_object":
        return json_object(fields)
    if kind == "text":
        return None
    raise fields.refuse("type", "text, json_object or json_schema")
