"""The grammar of an answer whose message is bound to a format, by xgrammar's own matcher."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xgrammar

from proxy.conversation import Conversation, Message
from proxy.errors import RequestError
from proxy.records import Ids
from proxy.rendering.answer_format import refuse_unenforced
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import load_tokenizer
from tests.proxy.checkpoint import write_checkpoint
from tests.proxy.rendering.harmony import HarmonyTokenizer
from tests.proxy.rendering.test_families import FAMILIES, TOOL, with_its_tokens

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
HARMONY_TOKENS = 200_019
REFUSED = {"deepseek-v4", "inkling"}
"""Families without a single token that begins each call."""
CALL = '<tool_call>\n{"name": "shell", "arguments": {}}\n</tool_call>'


class Grammar:
    """The grammar of answers of one checkpoint, and whether a text is one."""

    def __init__(self, rendering: Rendering, tools: list[dict[str, Any]], begun: str = "") -> None:
        self._tokenizer = rendering.tokenizer
        prompt = rendering.full(Conversation([Message("user", "Hi.")], tools))
        prompt = np.append(prompt, as_ids(self._tokenizer.encode(begun)))
        bound = rendering.bound_format({"json": SCHEMA}, prompt, tools)
        kind = xgrammar.VocabType.BYTE_LEVEL
        by_id = {token: text for text, token in self._tokenizer.get_vocab().items()}
        texts = [by_id.get(token, f"<unused {token}>") for token in range(max(by_id) + 1)]
        if isinstance(self._tokenizer, HarmonyTokenizer):
            kind = xgrammar.VocabType.RAW
            texts = [self._tokenizer.decode([token]) for token in range(HARMONY_TOKENS)]
        stops = list(rendering.stop_token_ids)
        info = xgrammar.TokenizerInfo(texts, vocab_type=kind, stop_token_ids=stops)
        compiler = xgrammar.GrammarCompiler(info)
        self._compiled = compiler.compile_structural_tag(bound["structural_tag"])
        self._stop = stops[0]

    def ends(self, answer: str) -> bool | None:
        """Whether the answer may end here; None if it is not even the beginning of one."""
        matcher = xgrammar.GrammarMatcher(self._compiled)
        for token in self._tokenizer.encode(answer):
            if not matcher.accept_token(token):
                return None
        return bool(matcher.accept_token(self._stop))


def as_ids(ids: list[int]) -> Ids:
    return np.array(ids, np.int32)


def test_message_is_valid_and_calls_and_reasoning_are_free(rendering: Rendering) -> None:
    grammar = Grammar(rendering, [TOOL])
    valid = '{"a": 12}'
    for before in ("", "<think>\nI wonder {\n</think>\n\n", "<think>look, a <tool_call>?</think>"):
        assert grammar.ends(before + valid) is True
        assert grammar.ends(before + CALL) is True
        assert grammar.ends(before + CALL + "\n" + CALL) is True
        assert grammar.ends(f"{before}\n{valid}") is True
        assert grammar.ends(before) is False
        assert grammar.ends(before + '{"a": ') is False
        assert grammar.ends(before + "Done.") is None
        assert grammar.ends(before + '{"b": 1}') is None
        assert grammar.ends(before + valid + "Done.") is None
    assert grammar.ends("<think>I wonder " + CALL) is True  # a call within the reasoning


def test_without_tools_only_the_reasoning_is_free(rendering: Rendering) -> None:
    grammar = Grammar(rendering, [])
    assert grammar.ends('<think>I wonder.</think>{"a": 1}') is True
    assert grammar.ends(CALL) is None
    assert grammar.ends("<think>I wonder.</think>" + CALL) is None


def test_prompt_that_ends_inside_the_reasoning(rendering: Rendering) -> None:
    grammar = Grammar(rendering, [TOOL], begun="<think>\n")
    assert grammar.ends('I wonder.</think>\n\n{"a": 1}') is True
    assert grammar.ends("I wonder.</think>" + CALL) is True
    assert grammar.ends('{"a": 1}') is False  # reasoning that is not closed
    assert grammar.ends("I wonder.</think>Done.") is None


@pytest.mark.parametrize("name", [*FAMILIES, "template"])
def test_each_family_binds_the_message_or_refuses(name: str, tmp_path: Path) -> None:
    template = "plain.jinja" if name == "template" else "qwen3.jinja"
    checkpoint = write_checkpoint(tmp_path, template=template)
    tokenizer = load_tokenizer(checkpoint)
    if name == "gpt-oss":
        tokenizer = HarmonyTokenizer(tokenizer)
    rendering = with_its_tokens(tokenizer, name, checkpoint)
    if name in REFUSED:
        with pytest.raises(RequestError, match=name):
            Grammar(rendering, [TOOL])
        return
    grammar = Grammar(rendering, [TOOL])
    prompt = rendering.full(Conversation([Message("user", "Hi.")], [TOOL]))
    begun = rendering.tokenizer.decode(prompt.tolist())
    call = rendering.tokenizer.decode(rendering.call_after([], prompt, "shell")[1]).strip()
    before = text = ""
    if "<think>" in begun.rpartition("</think>")[2]:
        before, call = "Hm.</think>\n\n", call.removeprefix("</think>").strip()
    elif name == "gpt-oss":
        before = "Hm.<|end|><|start|>assistant" if begun.endswith("<|message|>") else ""
        text, call = "<|channel|>final<|message|>", call.rpartition("<|start|>assistant")[2]
    assert grammar.ends(before + text + '{"a": 1}') is True
    assert grammar.ends(before + text + "Done.") is None
    assert grammar.ends(before + text) is False
    assert grammar.ends(before + call) is not None, call


@pytest.mark.parametrize(
    "part",
    [
        {"type": "number", "multipleOf": 3},
        {"type": "array", "uniqueItems": True},
        {"type": "string", "format": "colour"},
        {"type": "string", "pattern": "a+", "maxLength": 3},
        {"allOf": [{"type": "string"}, {"enum": ["a"]}]},
        {"not": {"const": 1}},
        {"if": {"const": 1}, "then": {}},
        {"type": "object", "propertyNames": {"pattern": "a"}, "properties": {}},
        {"type": "object", "patternProperties": {"a": {}}, "properties": {}},
    ],
    ids=json.dumps,
)
def test_what_a_grammar_would_pass_over_is_refused_by_name(part: dict[str, Any]) -> None:
    name = next(key for key in part if key not in ("type", "pattern", "properties"))
    for schema in (part, {"properties": {"a": {"items": part}}}, {"$defs": {"b": part}}):
        with pytest.raises(RequestError) as refused:
            refuse_unenforced(schema)
        assert name.removesuffix("Length") in refused.value.message or "Length" in name
    refuse_unenforced({"properties": {"not": {"enum": ["multipleOf"]}}, "default": part})
