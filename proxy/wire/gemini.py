"""Google's Gemini API: `POST /v1beta/models/MODEL:generateContent`, `:streamGenerateContent` and
`:countTokens`.

Accepts the names of JSON and of the protocol buffers (`systemInstruction`, `system_instruction`).
Function responses are matched to calls by their id, or else by name and order. What a text-only
model cannot read, and tools that Google would run, are named in a text, or left out of the prompt;
code that a backend runs (`wire.code_execution`) is calls and results.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from proxy.conversation.images import joined_blocks
from proxy.conversation.messages import (
    Conversation,
    Message,
    ToolCall,
    arguments_object,
    normalised,
)
from proxy.errors import ContextOverflow, ProxyError
from proxy.records import FinishReason
from proxy.rendering.deltas import Delta, ReasoningDelta, ResultDelta, TextDelta, ToolCallStart
from proxy.wire.code_execution import (
    CODE,
    GOOGLES,
    CodeItem,
    code_functions,
    code_part,
    item_code,
    part_result,
    result_part,
)
from proxy.wire.dialect import BOUNDS, WHOLE, Call, ForcedCall, Headers, Options, Outcome, Piece
from proxy.wire.fields import Fields, only_provider_tools
from proxy.wire.provided import PastCall

MAX_CANDIDATES = 8
_PATH = re.compile(
    r"(?:/(?P<trial>.+?))?/v1(?:beta|alpha)?[0-9]*/models/(?P<model>[^:]+)"
    r":(?P<method>generateContent|streamGenerateContent|countTokens)/?"
)
_STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
_OPTIONS = {
    "temperature": "temperature",
    "topP": "top_p",
    "topK": "top_k",
    "maxOutputTokens": "max_tokens",
    "seed": "seed",
    "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
}
"""By the name in `generationConfig`: that of the option."""
CONFIG = _OPTIONS.keys() | {
    "candidateCount",
    "stopSequences",
    "thinkingConfig",
    "responseMimeType",
    "responseSchema",
    "responseJsonSchema",
    "mediaResolution",
}
CONFIG_REFUSED: dict[str, tuple[Any, ...]] = {
    "responseModalities": (["TEXT"],),
    "responseLogprobs": (False,),
    "logprobs": (0,),
    "speechConfig": (),
    "imageConfig": (),
    "audioTimestamp": (False,),
}
"""Refused fields of `generationConfig`, with the values that are accepted all the same."""
TOP = {"contents", "systemInstruction", "tools", "toolConfig", "generationConfig"}
"""The honoured fields of a request, `CONFIG` those of its `generationConfig`."""
HARMLESS = {"safetySettings", "labels", "model", "store", "serviceTier"}
_SNAKE = re.compile(r"_([a-z])")
_RESULT_NAMES = ("output", "result", "error", "content")


class GeminiDialect:
    """The dialect of one request: its path names the model and the method."""

    name = "gemini"
    route = "models"

    def __init__(self, model: str = "", method: str = "generateContent", *, sse: bool = True):
        """`sse`: whether a stream is one of events (`alt=sse`); else it is a list."""
        self._model = model
        self._streams = method == "streamGenerateContent"
        self._sse = sse
        self.counts = method == "countTokens"

    def parse(self, fields: Fields, headers: Headers) -> Call:
        if self.counts and fields.get("generateContentRequest") is not None:
            fields = fields.child("generateContentRequest")
        request = _camel(fields)
        config = _camel(request.child("generationConfig"))
        unknown = _checked(request, config)
        tools, provided = parse_tools(request)
        past = PastCode() if provided else None
        messages = parse_messages(request, past)
        system = "\n".join(_texts(_camel(request.child("systemInstruction"))))
        if system:
            messages.insert(0, Message("system", system))
        if not any(message.role != "system" for message in messages):
            raise request.refuse("contents", "at least one content with a part")
        thinking = _camel(config.child("thinkingConfig"))
        return Call(
            model=self._model,
            conversation=Conversation(normalised(messages), tools),
            options=_options(request, config, sum(_name(tool) not in provided for tool in tools)),
            n=config.integer("candidateCount", 1, MAX_CANDIDATES) or 1,
            stream=self._streams and self._sse,
            provider_tools=provided,
            past_calls=past.calls if past else [],
            unknown=unknown,
            extra={"thoughts": thinking.flag("includeThoughts")},
        )

    def whole(self, call: Call, answer_id: str, outcomes: Sequence[Outcome]) -> bytes:
        candidates = [
            _candidate(index, list(_parts(call, outcome)), outcome)
            for index, outcome in enumerate(outcomes)
        ]
        body = _response(call, answer_id, candidates, outcomes)
        return orjson.dumps([body] if self._streams else body)

    def writer(self, call: Call, answer_id: str) -> GeminiWriter:
        return GeminiWriter(call, answer_id)

    def error(self, error: ProxyError) -> bytes:
        body = {"error": _error(error)}
        return orjson.dumps([body] if self._streams and not self._sse else body)

    def counted(self, tokens: int) -> dict[str, Any]:
        """The answer of `countTokens`."""
        return {"totalTokens": tokens}


class GeminiWriter:
    """Writes the chunks of one streamed response. A call is sent when it is complete."""

    keep_alive = b"\n"
    """Google's clients read a stream line by line and know no comments."""

    def __init__(self, call: Call, answer_id: str) -> None:
        self._call = call
        self._id = answer_id
        self._open: dict[int, tuple[ToolCall, int]] = {}
        """By candidate: the call whose arguments are not complete, and its turn."""

    def start(self, prompt_tokens: int, turn: int) -> bytes:
        return b""

    def piece(self, piece: Piece) -> bytes:
        parts = [part for delta in piece.deltas for part in self._delta(piece, delta)]
        if not parts:
            return b""
        return self._chunk([_candidate(piece.choice, parts, None)], ())

    def end(self, outcomes: Sequence[Outcome]) -> bytes:
        candidates = [
            _candidate(index, list(self._closed(index)), outcome)
            for index, outcome in enumerate(outcomes)
        ]
        return self._chunk(candidates, outcomes)

    def error(self, error: ProxyError) -> bytes:
        return b"data: " + orjson.dumps({"error": _error(error)}) + b"\r\n\r\n"

    def _delta(self, piece: Piece, delta: Delta) -> Iterator[dict[str, Any]]:
        candidate = piece.choice
        if isinstance(delta, TextDelta):
            yield from self._closed(candidate)
            yield {"text": delta.text}
        elif isinstance(delta, ReasoningDelta):
            if self._call.extra["thoughts"]:
                yield {"text": delta.text, "thought": True}
        elif isinstance(delta, ToolCallStart):
            yield from self._closed(candidate)
            self._open[candidate] = (ToolCall(delta.id, delta.name, ""), piece.turn)
        elif isinstance(delta, ResultDelta):
            yield from self._closed(candidate)
            yield result_part(delta, piece.turn)
        else:
            self._open[candidate][0].arguments += delta.text

    def _closed(self, candidate: int) -> Iterator[dict[str, Any]]:
        begun = self._open.pop(candidate, None)
        if begun is not None:
            yield _call_part(self._call, *begun)

    def _chunk(self, candidates: list[dict[str, Any]], outcomes: Sequence[Outcome]) -> bytes:
        body = _response(self._call, self._id, candidates, outcomes)
        return b"data: " + orjson.dumps(body) + b"\r\n\r\n"


def addressed(path: str, alt: str) -> tuple[str | None, str, GeminiDialect] | None:
    """The session that a path of this API names, its route, and the dialect of the request; None
    for another path. `alt` is the parameter of that name in the query."""
    found = _PATH.fullmatch(path)
    if found is None:
        return None
    dialect = GeminiDialect(found["model"], found["method"], sse=alt == "sse")
    return found["trial"], f"models:{found['method']}", dialect


class PastCode:
    """The code that the proxy has run, in the order of a history."""

    def __init__(self) -> None:
        self.calls: list[PastCall] = []
        """Those with a result."""
        self._open: list[CodeItem] = []

    def call(self, part: Fields) -> ToolCall:
        """The call of a part with `executableCode`."""
        code = next(iter(part.quoted_objects("executableCode")), Fields({}))
        item = item_code(code, f"{CODE}_{len(self.calls) + len(self._open)}")
        self._open.append(item)
        return item.call

    def result(self, part: Fields) -> Message | None:
        """The message of a part with `codeExecutionResult`; None if no code precedes it."""
        if not self._open:
            return None
        result = next(iter(part.quoted_objects("codeExecutionResult")), Fields({}))
        named = [item for item in self._open if result.quoted("id").endswith(f"_{item.call.id}")]
        item = (named or self._open)[0]
        self._open.remove(item)
        item, text = part_result(result, item)
        message = Message("tool", text, tool_call_id=item.call.id)
        self.calls.append(PastCall(message, item.call, item))
        return message


def parse_messages(request: Fields, past: PastCode | None = None) -> list[Message]:
    """`past` gets the code of the history; None: code is text. Raises RequestError."""
    messages: list[Message] = []
    open_calls: list[ToolCall] = []
    for content in request.objects("contents"):
        role = content.text("role", "user")
        if role not in ("user", "model", "function"):
            raise content.refuse("role", "user, model or function")
        parts = [_camel(part) for part in content.objects("parts")]
        if role == "model":
            answers = _answers(parts, past)
            done = {answer.tool_call_id for answer in answers if answer.role == "tool"}
            made = [call for answer in answers for call in answer.tool_calls]
            open_calls = [call for call in made if call.id not in done]
            messages += answers
            continue
        texts = []
        for part in parts:
            if part.get("functionResponse") is not None:
                messages.append(_result(part.child("functionResponse"), open_calls))
            else:
                texts.append(_part_text(part))
        if texts or not parts:
            messages.append(Message("user", joined_blocks(texts)))
    return messages


def parse_tools(request: Fields) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """The functions, and by name the tools whose calls the proxy answers itself. Tools that Google
    would run are left out, unless a backend runs them.

    Raises:
        RequestError: a malformed function, or Google would run all of the tools.
    """
    tools: list[dict[str, Any]] = []
    for tool in request.objects("tools"):
        for declared in _camel(tool).objects("functionDeclarations"):
            declaration = _camel(declared)
            function: dict[str, Any] = {"name": declaration.text("name")}
            if declaration.get("description") is not None:
                function["description"] = declaration.text("description")
            schema = declaration.child("parametersJsonSchema").data
            function["parameters"] = schema or json_schema(declaration.child("parameters").data)
            tools.append({"type": "function", "function": function})
    own = {tool["function"]["name"] for tool in tools}
    provided: dict[str, dict[str, Any]] = {}
    for tool in request.objects("tools"):
        for name in tool.data:
            if name == "functionDeclarations":
                continue
            is_code = name == GOOGLES and CODE not in own
            if is_code and CODE not in provided and CODE in tool.backends:
                tools += [{"type": "function", "function": each} for each in code_functions(name)]
            elif not is_code or CODE not in tool.backends:
                tool.note("tools_left_out", name)
            if is_code:
                provided[CODE] = {name: tool.get(name)}
    names = {name for tool in request.items("tools") for name in tool}
    if not tools and names - {"functionDeclarations"}:
        raise only_provider_tools(request)
    return tools, provided


def json_schema(schema: Any) -> Any:
    """Google's form of a schema (`"type": "STRING"`, `nullable`) as JSON Schema."""
    if isinstance(schema, list):
        return [json_schema(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    out: dict[str, Any] = {}
    for name, value in schema.items():
        if name == "properties" and isinstance(value, dict):
            out[name] = {key: json_schema(each) for key, each in value.items()}
        elif name in ("enum", "default", "example", "required", "propertyOrdering", "nullable"):
            out[name] = value
        elif name == "type" and isinstance(value, str):
            out[name] = value.lower()
        else:
            out[name] = json_schema(value)
    if out.pop("nullable", False) is True and isinstance(out.get("type"), str):
        out["type"] = [out["type"], "null"]
    return out


def _camel(fields: Fields) -> Fields:
    """The same object with its names as in JSON."""
    if any("_" in name for name in fields.data):
        for name in [name for name in fields.data if "_" in name]:
            camel = _SNAKE.sub(lambda found: found[1].upper(), name)
            fields.data.setdefault(camel, fields.data.pop(name))
    return fields


def _checked(request: Fields, config: Fields) -> tuple[str, ...]:
    """The names of unknown fields. Raises RequestError for known ones that are not honoured."""
    if request.get("cachedContent"):
        raise request.refuse("cachedContent", "no value (contents cannot be kept here)")
    for name, neutral in CONFIG_REFUSED.items():
        value = config.get(name)
        if value is not None and value not in neutral:
            raise config.refuse(name, "no value (the proxy does not support this parameter)")
    unknown = [name for name in request.data if name not in TOP | HARMLESS | {"cachedContent"}]
    inner = config.data.keys() - CONFIG - CONFIG_REFUSED.keys()
    return (*unknown, *(f"generationConfig.{name}" for name in sorted(inner)))


def _options(request: Fields, config: Fields, functions: int) -> Options:
    """`functions` is the number of the agent's own."""
    options = Options()
    for name, option in _OPTIONS.items():
        low, high = BOUNDS[option]
        read = Fields.integer if option in WHOLE else Fields.number
        setattr(options, option, read(config, name, low, high))  # type: ignore[arg-type]
    options.stop = config.stops("stopSequences")
    options.structured = _structured(config)
    calling = _camel(_camel(request.child("toolConfig")).child("functionCallingConfig"))
    mode = calling.text("mode", "AUTO")
    if mode not in ("AUTO", "ANY", "NONE", "VALIDATED", "MODE_UNSPECIFIED"):
        raise calling.refuse("mode", "AUTO, ANY, VALIDATED or NONE")
    options.tool_calls = mode != "NONE"
    if mode == "ANY":
        allowed = calling.items("allowedFunctionNames")
        if 1 < len(allowed) < functions:
            raise calling.refuse("allowedFunctionNames", "one name, or those of all functions")
        only = allowed[0] if len(allowed) == 1 else None
        if only is not None and not isinstance(only, str):
            raise calling.refuse("allowedFunctionNames", "strings")
        options.forced = ForcedCall(only)
    return options


def _structured(config: Fields) -> dict[str, Any] | None:
    kind = config.text("responseMimeType", "text/plain")
    if kind not in ("text/plain", "application/json"):
        raise config.refuse("responseMimeType", "text/plain or application/json")
    schema = config.child("responseJsonSchema").data
    schema = schema or json_schema(config.child("responseSchema").data)
    if schema:
        return {"json": schema}
    return {"json_object": True} if kind == "application/json" else None


def _name(tool: dict[str, Any]) -> str:
    return str(tool["function"]["name"])


def _answers(parts: list[Fields], past: PastCode | None) -> list[Message]:
    """One message, and more where the proxy has run code: what follows its result is another
    answer."""
    out: list[Message] = []
    begun: list[Fields] = []
    for part in parts:
        if past is not None and part.get("codeExecutionResult") is not None:
            if begun:
                out.append(_answer(begun, past))
            begun = []
            result = past.result(part)
            if result is not None:
                out.append(result)
                continue
        begun.append(part)
    return [*out, _answer(begun, past)] if begun or not out else out


def _answer(parts: list[Fields], past: PastCode | None) -> Message:
    message = Message("assistant")
    texts, thoughts = [], []
    for part in parts:
        if part.get("functionCall") is not None:
            call = part.child("functionCall")
            arguments = orjson.dumps(call.child("args").data).decode()
            made = ToolCall(call.text("id", ""), call.text("name", ""), arguments)
            message.tool_calls.append(made)
        elif past is not None and part.get("executableCode") is not None:
            message.tool_calls.append(past.call(part))
        elif part.flag("thought"):
            thoughts.append(part.text("text", ""))
        else:
            texts.append(_part_text(part))
    message.text, message.reasoning = "".join(texts), "".join(thoughts) or None
    for index, call_made in enumerate(message.tool_calls):
        call_made.id = call_made.id or f"call_{index}"
    return message


def _result(response: Fields, open_calls: list[ToolCall]) -> Message:
    """A tool's message, with the id of the call that it answers."""
    name, call_id = response.text("name", ""), response.text("id", "")
    by_id = [call for call in open_calls if call_id and call.id == call_id]
    by_name = [call for call in open_calls if call.name == name]
    answered = next(iter(by_id or by_name or open_calls), None)
    if answered is not None:
        open_calls.remove(answered)
        call_id = answered.id
    value = response.child("response").data
    text = orjson.dumps(value).decode()
    if len(value) == 1:
        ((key, only),) = value.items()
        text = only if key in _RESULT_NAMES and isinstance(only, str) else text
    texts = [text, *(_part_text(_camel(part)) for part in response.objects("parts"))]
    return Message("tool", joined_blocks(texts), tool_call_id=call_id)


def _texts(content: Fields) -> list[str]:
    return [_part_text(_camel(part)) for part in content.objects("parts")]


def _part_text(part: Fields) -> str:
    if part.get("text") is not None:
        return part.text("text")
    for name in ("inlineData", "fileData"):
        if part.get(name) is not None:
            return _data_text(part, _camel(part.child(name)))
    known = {"thoughtSignature", "thought", "videoMetadata", "mediaResolution"}
    shown = {name: value for name, value in part.data.items() if name not in known}
    return orjson.dumps(shown).decode() if shown else ""


def _data_text(part: Fields, data: Fields) -> str:
    """The image in a part, or the text that stands for what it holds."""
    kind = data.text("mimeType", "a file")
    text = f"[{kind}: this model reads only text]"
    if part.images is None:
        return text
    source: dict[str, Any] = {"type": "base64", "data": data.get("data")}
    if data.get("fileUri") is not None:
        source = {"type": "url", "url": data.get("fileUri")}
    block = {"type": "document" if kind == "application/pdf" else "image", "source": source}
    taken = part.images.taken(block, text)
    return text if taken is None else taken


def _parts(call: Call, outcome: Outcome) -> Iterator[dict[str, Any]]:
    for before in outcome.before:
        yield from _parts(call, before)
    message = outcome.message
    if message.reasoning and call.extra["thoughts"]:
        yield {"text": message.reasoning, "thought": True}
    if message.text:
        yield {"text": message.text}
    for made in message.tool_calls:
        yield _call_part(call, made, outcome.turn)
    for result in outcome.results:
        yield result_part(result, outcome.turn)


def _call_part(call: Call, made: ToolCall, turn: int) -> dict[str, Any]:
    if made.name in call.provider_tools:
        return code_part(made, turn)
    arguments = arguments_object(made)
    return {"functionCall": {"id": made.id, "name": made.name, "args": arguments}}


def _candidate(index: int, parts: list[dict[str, Any]], outcome: Outcome | None) -> dict[str, Any]:
    candidate: dict[str, Any] = {"content": {"parts": parts, "role": "model"}, "index": index}
    if outcome is not None:
        cut = outcome.finish_reason is FinishReason.LENGTH
        candidate["finishReason"] = "MAX_TOKENS" if cut else "STOP"
        if not parts:
            candidate["content"]["parts"] = [{"text": ""}]
    return candidate


def _response(
    call: Call, answer_id: str, candidates: list[dict[str, Any]], outcomes: Sequence[Outcome]
) -> dict[str, Any]:
    body: dict[str, Any] = {"candidates": candidates}
    if outcomes:
        prompt = outcomes[0].prompt_tokens
        sampled = sum(outcome.completion_tokens for outcome in outcomes)
        thoughts = sum(outcome.reasoning_tokens for outcome in outcomes)
        body["usageMetadata"] = {
            "promptTokenCount": prompt,
            "candidatesTokenCount": sampled - thoughts,
            "thoughtsTokenCount": thoughts,
            "totalTokenCount": prompt + sampled,
            "cachedContentTokenCount": outcomes[0].cached_tokens,
        }
    return {**body, "modelVersion": call.model, "responseId": answer_id}


def _error(error: ProxyError) -> dict[str, Any]:
    message = error.message
    if isinstance(error, ContextOverflow):
        message = (
            f"The input token count ({error.prompt_tokens}) exceeds the maximum number of tokens "
            f"allowed ({error.max_tokens})."
        )
    status = _STATUSES.get(error.status, "INTERNAL" if error.status >= 500 else "INVALID_ARGUMENT")
    return {"code": error.status, "message": message, "status": status}
