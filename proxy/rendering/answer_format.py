"""Binds the final message of an answer to a format; reasoning and tool calls stay possible.

An agent that sends a JSON schema beside tools wants the last message of its loop in that form.
Until then the model calls tools, and before everything it reasons. The engine gets one grammar of
all of this, as a structural tag (xgrammar's form, which vLLM and SGLang take):

    [reasoning] (what begins a call, then anything | the message, by the schema)

Invariant: an answer that ends by itself, and that begins no call, is valid by the schema. What the
family's own tokens cannot tell apart, or the grammar would not enforce, is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import orjson

from proxy.conversation import Conversation, Message
from proxy.errors import RequestError
from proxy.records import Ids
from proxy.rendering.families import Family
from proxy.rendering.markers import Markers
from proxy.rendering.openings import written_before_call, written_before_text
from proxy.rendering.tokenizer import Tokenizer

Format = dict[str, Any]
MAX_BLANKS = 32
"""White space between two parts of the message. A model that is not trained for the format may
prefer white space to all that the grammar allows, and would write nothing else."""
_BLANK: Format = {"type": "regex", "pattern": rf"[ \n\t\r]{{0,{MAX_BLANKS}}}"}
_UNENFORCED = ("not", "if", "dependentRequired", "dependentSchemas", "unevaluatedItems")
"""Keywords of JSON Schema that a structural tag passes over in any schema."""
_OF_LISTS = ("uniqueItems", "contains", "minContains", "maxContains")
_STRING_FORMATS = frozenset(("email", "hostname", "ipv4", "ipv6", "json-pointer", "uuid"))
_STRING_FORMATS |= {"date", "date-time", "duration", "time", "relative-json-pointer"}
_STRING_FORMATS |= {"uri", "uri-reference", "uri-template"}
_ANALYSIS = "<|channel|>analysis<|message|>"
_HARMONY_CALLS = ("", "<|channel|>commentary", "<|channel|>analysis")
_HARMONY_MARKS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>")
_SCHEMAS = ("items", "additionalProperties", "additionalItems", "propertyNames")
_LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")


class Language(Protocol):
    """The part of `Rendering` that formats need."""

    @property
    def family(self) -> Family: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def markers(self) -> Markers | None: ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...

    def full(self, conversation: Conversation) -> Ids: ...

    def parse(
        self, sampled: list[int], prompt_end: Ids, tools: list[dict[str, Any]], *, calls: bool
    ) -> Message: ...


class AnswerFormats:
    """The formats of a checkpoint. Example: AnswerFormats(rendering).bound({"json": {}}, [], [])"""

    def __init__(self, language: Language) -> None:
        self._language = language
        self._tokenizer = language.tokenizer
        marks = [self._tokenizer.fast.token_to_id(mark) for mark in ("<think>", "</think>")]
        known = [token for token in marks if token is not None]
        self._thinking = (known[0], known[1]) if len(known) == len(marks) else None
        self._call: int | None = None

    def bound(
        self, structured: dict[str, Any], answer_opening: list[int], tools: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """The `structured_outputs` for an answer whose message is bound to `structured`.

        `answer_opening` are the last ids of the prompt, from the beginning of the answer on.
        `tools` are those that the answer may call.

        Raises RequestError.
        """
        schema = structured.get("json", {"type": "object"})
        if self._language.family.name == "gpt-oss":
            refuse_unenforced(schema)
            return _tagged(self._harmony(schema, answer_opening, bool(tools)))
        if self._thinking is None and not tools:
            return structured
        refuse_unenforced(schema)
        return _tagged(self._answer(schema, answer_opening, tools))

    def _answer(
        self, schema: dict[str, Any], answer_opening: list[int], tools: list[dict[str, Any]]
    ) -> Format:
        stops = list(self._language.stop_token_ids)
        ends: list[Format] = [_message(schema, self._excluded(schema))]
        ended = list(stops)
        calls: list[Format] = []
        if tools and self._language.family.call_is_answer:
            ends.append(_message(_calls_as_json(tools)))
        elif tools:
            marker = self._call_marker()
            calls = [_sequence(_token(marker), _any_token(stops))]
            ended.append(marker)
        spoken = _either(*calls, *ends)
        if self._thinking is None:
            return _sequence(_BLANK, spoken)
        think, end_think = self._thinking
        after = _sequence(_token(end_think), _BLANK, spoken)
        rests = [after]
        if calls:  # one within the reasoning is a call, unless the reasoning ends after it
            begun = _sequence(_token(self._call_marker()), _any_token([end_think, *stops]))
            rests.append(_sequence(begun, {"type": "optional", "content": after}))
        reasoned = _sequence(_any_token([end_think, *ended]), _either(*rests))
        if [token for token in answer_opening if token in self._thinking][-1:] == [think]:
            return reasoned  # the prompt ends inside the reasoning
        return _sequence(_BLANK, _either(spoken, _sequence(_token(think), reasoned)))

    def _harmony(self, schema: dict[str, Any], answer_opening: list[int], calls: bool) -> Format:
        """gpt-oss's answer: analysis messages, then a call or the message of the final channel."""
        stops = list(self._language.stop_token_ids)
        marks = self._tokenizer.convert_tokens_to_ids(list(_HARMONY_MARKS))
        thought = _sequence(_any_token([*marks, *stops]), _text("<|end|><|start|>assistant"))
        ends = [_sequence(_text("<|channel|>final<|message|>"), _message(schema, ["<|"]))]
        if calls:
            named = [_text(f"{before} to=functions.") for before in _HARMONY_CALLS]
            ends.append(_sequence(_either(*named), {"type": "any_text"}))
        analysis = _sequence(_text(_ANALYSIS), thought)
        answer = _sequence({"type": "star", "content": analysis}, _either(*ends))
        within = self._tokenizer.decode(answer_opening).endswith(_ANALYSIS)
        return _sequence(thought, answer) if within else answer

    def _excluded(self, schema: Any) -> list[str]:
        """Texts that strings of the message must not have, because they are single tokens that
        begin something else. xgrammar would drop bounds of length for them."""
        lengths = any("minLength" in each or "maxLength" in each for each in _schemas(schema))
        markers = self._language.markers
        if lengths or markers is None:
            return []
        return [str(self._tokenizer.fast.id_to_token(token)) for token in sorted(markers.all)]

    def _call_marker(self) -> int:
        """The token that begins each call of the family, and nothing else. Raises RequestError."""
        if self._call is None:
            self._call = self._found_marker()
        if self._call is None:
            raise RequestError(
                "response_format: a format beside tools cannot be enforced with the "
                f"{self._language.family.name!r} template; remove the format or the tools",
                param="response_format",
            )
        return self._call

    def _found_marker(self) -> int | None:
        markers = self._language.markers
        if markers is not None:
            return markers.tool
        call, text = written_before_call(self._language), written_before_text(self._language)
        if call is None or text is None or text.strip():
            return None
        ids = self._tokenizer.encode(call)
        added = self._tokenizer.fast.get_added_tokens_decoder()
        first = next((i for i in ids if i in added), None)
        if first is None or call.partition(added[first].content)[0].strip():
            return None
        return int(first)


def refuse_unenforced(schema: Any) -> None:
    """Raises RequestError for a schema with a keyword that a structural tag does not enforce."""
    for each in _schemas(schema):
        keyword = _unenforced(each)
        if keyword is not None:
            raise RequestError(
                f"response_format: the schema's {keyword!r} cannot be enforced beside tools or "
                "reasoning; remove it from the schema, or check the answer yourself",
                param="response_format",
            )


def _unenforced(schema: dict[str, Any]) -> str | None:
    found = next((name for name in _UNENFORCED if name in schema), None)
    found = found or next((name for name in _OF_LISTS if schema.get(name)), None)
    if found is not None:
        return found
    if "multipleOf" in schema:
        return "multipleOf"
    kind = schema.get("format")
    if isinstance(kind, str) and kind not in _STRING_FORMATS:
        return f"format: {kind}"
    bounded = "minLength" in schema or "maxLength" in schema
    if bounded and ("pattern" in schema or "format" in schema):
        return "minLength or maxLength with a pattern"
    if len(schema.get("allOf") or ()) > 1:
        return "allOf"
    if "propertyNames" in schema and ("properties" in schema or "patternProperties" in schema):
        return "propertyNames"
    patterns = schema.get("patternProperties") or {}
    return (
        "patternProperties" if patterns and ("properties" in schema or len(patterns) > 1) else None
    )


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema and all schemas in it; values of `enum`, `const`, `default` are none."""
    if not isinstance(schema, dict):
        return
    yield schema
    inner = [schema.get(name) for name in _SCHEMAS]
    for name in _LISTS_OF_SCHEMAS:
        listed = schema.get(name)
        inner += listed if isinstance(listed, list) else []
    if isinstance(schema.get("items"), list):
        inner += schema["items"]
    for name in _NAMED_SCHEMAS:
        named = schema.get(name)
        inner += named.values() if isinstance(named, dict) else []
    for each in inner:
        yield from _schemas(each)


def _calls_as_json(tools: list[dict[str, Any]]) -> dict[str, Any]:
    """The schema of a call that is the whole answer (Llama 3)."""
    names = [tool["function"]["name"] for tool in tools]
    properties = {"name": {"enum": names}, "parameters": {"type": "object"}}
    return {
        "type": "object",
        "properties": properties,
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _tagged(answer: Format) -> dict[str, Any]:
    tag = {"type": "structural_tag", "format": answer}
    return {"structural_tag": orjson.dumps(tag).decode()}


def _message(schema: dict[str, Any], excludes: list[str] | None = None) -> Format:
    found: Format = {
        "type": "json_schema",
        "json_schema": schema,
        "max_whitespace_cnt": MAX_BLANKS,
    }
    return {**found, "excludes": excludes} if excludes else found


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def _either(*elements: Format) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def _token(token: int) -> Format:
    return {"type": "token", "token": token}


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def _any_token(excluded: list[int]) -> Format:
    return {"type": "any_tokens", "exclude_tokens": excluded}
