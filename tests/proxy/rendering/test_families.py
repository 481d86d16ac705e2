"""Streaming, bridges and forced calls for every renderer family that works with a small
vocabulary."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from renderers.base import MODEL_RENDERER_MAP
from tokenizers import AddedToken

from proxy.config import RenderingConfig
from proxy.conversation import Conversation, Message, ToolCall
from proxy.errors import ConfigurationError, RequestError
from proxy.records import ForkCause, Ids
from proxy.rendering.deltas import Delta, ReasoningDelta, ToolCallStart
from proxy.rendering.families import FAMILIES as KNOWN
from proxy.rendering.prefix_stream import PrefixParser
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import (
    REMEMBERED_BYTES,
    RecentTexts,
    StandIns,
    Tokenizer,
    load_tokenizer,
)
from proxy.token_tree.paths import common_prefix
from tests.proxy.checkpoint import write_checkpoint
from tests.proxy.rendering.harmony import SPECIAL, HarmonyTokenizer
from tests.proxy.rendering.test_stream import put_together, without_ids
from tests.proxy.token_tree.test_tree import Recorder

FAMILIES = sorted(set(MODEL_RENDERER_MAP.values()))
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Runs.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}
_MISSING = re.compile(r"token (?:for )?['\"](.+?)['\"]")


@dataclass
class Family:
    rendering: Rendering
    pieces: list[list[int]]
    """A family, and parts of its answers: special tokens, a rendered answer with a call, text."""
    generation_prompt: np.ndarray[Any, np.dtype[np.int32]]


@pytest.fixture(scope="module")
def family_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def build(name: str) -> Family:
        template = "plain.jinja" if name == "template" else "qwen3.jinja"
        checkpoint = write_checkpoint(tmp_path_factory.mktemp(name), template=template)
        tokenizer = load_tokenizer(checkpoint)
        if name == "gpt-oss":
            tokenizer = HarmonyTokenizer(tokenizer)
        rendering = with_its_tokens(tokenizer, name, checkpoint)
        prompt = rendering.full(Conversation([Message("user", "List.")], [TOOL]))
        return Family(rendering, _pieces(rendering, tokenizer), prompt)

    return build


def with_its_tokens(tokenizer: Tokenizer, name: str, checkpoint: Path) -> Rendering:
    """Adds the tokens that the renderer reports as missing, until it accepts the vocabulary."""
    added = ""
    while True:
        try:
            return Rendering(tokenizer, RenderingConfig(renderer=name))
        except ConfigurationError as error:
            missing = _MISSING.search(error.message.partition(str(checkpoint))[2])
            if missing is None or missing[1] == added:
                raise
            added = missing[1]
            tokenizer.fast.add_tokens([AddedToken(added, normalized=False, special=True)])
            tokenizer.pairs = None  # built from the previous vocabulary
            tokenizer.remembered = RecentTexts(REMEMBERED_BYTES)  # not of the previous vocabulary


def _behind_reasoning(rendering: Rendering, whole: Ids) -> list[int]:
    """gpt-oss's answer after a prompt that ends inside the analysis channel."""
    text = rendering.tokenizer.decode(whole.tolist())
    answer = slice(text.index("<|start|>assistant"), text.rindex("<|start|>assistant"))
    return rendering.tokenizer.encode(f"I wonder.<|end|>{text[answer]}")


def _pieces(rendering: Rendering, tokenizer: Tokenizer) -> list[list[int]]:
    special: Iterable[int] = tokenizer.fast.get_added_tokens_decoder()
    if isinstance(tokenizer, HarmonyTokenizer):
        special = tokenizer.convert_tokens_to_ids(list(SPECIAL))
    call = ToolCall("call_0", "shell", '{"command": "ls été 数学 😀"}')
    asked = Conversation([Message("user", "List.")], [TOOL])
    start = len(rendering.full(asked))
    texts = ("Let me look.", " ", "\n", "été", '{"name": "shell", "arguments": {}}', "a < b [c]")
    pieces = [[token] for token in special] + [tokenizer.encode(text) for text in texts] * 4
    for answer in (
        Message("assistant", "Let me look.", None, [call]),
        Message("assistant", "", "I wonder.", [call, call]),
        Message("assistant", "Done.", "I wonder."),
    ):
        with suppress(RequestError):  # Llama 3 has one call per answer
            whole = rendering.full(Conversation([*asked.messages, answer], asked.tools))
            pieces += [whole[start:].tolist()] * 8
            if rendering.name == "gpt-oss":
                pieces += [_behind_reasoning(rendering, whole)] * 8
    return pieces


@pytest.mark.parametrize("name", [*FAMILIES, "template"])
def test_tools_are_in_the_prompt_or_known_to_be_left_out(name: str, family_of: Any) -> None:
    rendering = family_of(name).rendering
    conversation = Conversation([Message("user", "Go.")], [TOOL])
    prompt = rendering.tokenizer.decode(rendering.full(conversation).tolist())
    assert rendering.shows_tools == (TOOL["function"]["name"] in prompt)


@pytest.mark.parametrize("name", [*FAMILIES, "template"])
def test_concatenated_deltas_equal_the_parsed_message(name: str, family_of: Any) -> None:
    family: Family = family_of(name)

    @settings(max_examples=25, deadline=None)
    @given(st.lists(st.sampled_from(family.pieces), max_size=6), st.data())
    def check(parts: list[list[int]], data: st.DataObject) -> None:
        ids = [token for part in parts for token in part]
        ids = ids[: data.draw(st.integers(len(ids) // 2, len(ids)))]
        parser = PrefixParser(family.rendering, family.generation_prompt, [TOOL])
        deltas: list[Delta] = []
        at = 0
        while at < len(ids):
            size = data.draw(st.integers(1, 8))
            deltas += parser.feed(ids[at : at + size])
            at += size
        rest, streamed = parser.finish()
        whole = family.rendering.parse(ids, family.generation_prompt, [TOOL], calls=True)
        text, reasoning, calls = put_together(deltas + rest)
        assert (text, reasoning or None, calls) == (
            streamed.text,
            streamed.reasoning,
            streamed.tool_calls,
        )
        assert (streamed.text, streamed.reasoning) == (whole.text, whole.reasoning)
        assert without_ids(streamed.tool_calls) == without_ids(whole.tool_calls)

    check()


@pytest.mark.parametrize("name", [*FAMILIES, "template"])
def test_arguments_are_streamed_while_they_are_sampled(name: str, family_of: Any) -> None:
    family: Family = family_of(name)
    command = "grep -rn needle src | sort | uniq -c | head; " * 20
    call = ToolCall("functions.shell:0", "shell", json.dumps({"command": command.strip()}))
    answered = [Message("user", "List."), Message("assistant", "", None, [call])]
    whole = family.rendering.full(Conversation(answered, [TOOL]))
    start = common_prefix(whole, family.generation_prompt)
    prompt, ids = whole[:start], whole[start:].tolist()
    if name == "gpt-oss":  # its prompt opens the reasoning, which the answer ends
        prompt, ids = family.generation_prompt, _behind_reasoning(family.rendering, whole)
    parser = PrefixParser(family.rendering, prompt, [TOOL])
    deltas: list[Delta] = []
    for token in ids[: len(ids) // 2]:
        deltas += parser.feed([token])
    deltas = [delta for delta in deltas if not isinstance(delta, ReasoningDelta)]
    assert isinstance(deltas[0], ToolCallStart)
    assert deltas[0].name == "shell"
    assert len(deltas) > 3
    assert len(put_together(deltas)[2][0].arguments) > len(command) / 4


REASONING = {
    *("deepseek-r1", "gemma4", "glm-4.5", "glm-5", "glm-5.1", "glm-5.3", "gpt-oss", "inkling"),
    *("kimi-k2.5", "laguna-s-2.1", "minimax-m2", "nemotron-3", "nemotron-3-ultra"),
    *("nemotron-3.5", "qwen3", "qwen3.5", "qwen3.6", "qwen3.8"),
}
"""Families that reason before they call, so that no call is begun for them."""


@pytest.mark.parametrize("forced", ["shell", None])
@pytest.mark.parametrize("name", [*FAMILIES, "template"])
def test_forced_call_begins_as_the_family_writes_it(
    name: str, forced: str | None, family_of: Any
) -> None:
    rendering = family_of(name).rendering
    if name == "inkling" and forced is None:
        with pytest.raises(RequestError, match="name the tool"):
            rendering.opening(forced)
        return
    if name in REASONING:
        assert len(rendering.opening(forced)) == 0
        return
    decode = rendering.tokenizer.decode
    opening = rendering.opening(forced)
    call = ToolCall("functions.shell:0", "shell", '{"command": "ls"}')
    answered = [Message("user", "Hello."), Message("assistant", "", None, [call])]
    written = decode(rendering.full(Conversation(answered)).tolist())
    begun = decode(opening.tolist()).lstrip()
    assert begun
    assert "</think>" not in begun
    assert begun in written
    rest = rendering.tokenizer.encode(written.partition(begun)[2])
    prompt = rendering.full(Conversation(answered[:1]))
    message = rendering.parse([*opening.tolist(), *rest], prompt, [TOOL], calls=True)
    assert [(c.name, json.loads(c.arguments)) for c in message.tool_calls] == [
        ("shell", {"command": "ls"})
    ]


@pytest.mark.parametrize("forced", ["shell", None])
@pytest.mark.parametrize("name", sorted(REASONING))
def test_answer_without_the_required_call_goes_on_with_one(
    name: str, forced: str | None, family_of: Any
) -> None:
    """Whatever the model said: text, reasoning alone, nothing, a call without an end."""
    family: Family = family_of(name)
    rendering, prompt = family.rendering, family.generation_prompt
    encode, decode = rendering.tokenizer.encode, rendering.tokenizer.decode
    for text in ("I wonder.</think>Let me look.", "I wonder.", "", "Look.<tool_call>she"):
        spoken = encode(text)
        kept, begun = rendering.call_after(spoken, prompt, forced)
        assert kept in (0, len(spoken))
        opening, begins = [*spoken[:kept], *begun], decode(begun)
        call = ToolCall("functions.shell:0", "shell", '{"command": "ls"}')
        answered = [Message("user", "Hello."), Message("assistant", "", None, [call])]
        written = decode(rendering.full(Conversation(answered)).tolist())
        ends = (begins[at:] for at in range(len(begins)) if begins[at:] in written)
        rest = written.rpartition(next(ends))[2]
        message = rendering.parse([*opening, *encode(rest)], prompt, [TOOL], calls=True)
        assert [(c.name, json.loads(c.arguments)) for c in message.tool_calls] == [
            ("shell", {"command": "ls"})
        ]


@pytest.mark.parametrize("name", [*FAMILIES, "template"])
def test_answer_with_a_prefill_is_continued(name: str, family_of: Any) -> None:
    rendering = family_of(name).rendering
    prompt = rendering.full(Conversation([Message("user", "Hi.")]))
    opening = rendering.prefill("Let me look.").tolist()
    sampled = rendering.tokenizer.encode(" It is done.")
    message = rendering.parse([*opening, *sampled], prompt, [], calls=True)
    assert message == Message("assistant", "Let me look. It is done.")


@pytest.mark.parametrize("name", [*FAMILIES, "template"])
def test_unchanged_history_extends_the_path_or_forks_as_unprovable(
    name: str, family_of: Any
) -> None:
    """The next prompt starts with the whole path, or the turn forks as unprovable; and the sampled
    answer is parsed as the message that was rendered."""
    family: Family = family_of(name)
    recorder = Recorder(family.rendering)
    asked = Conversation([Message("user", "List.")], [TOOL])
    for _ in range(3):
        turn, message = recorder.ask(asked, "Let me look.", close=False)
        assert "Let me look." in (message.text, message.reasoning)
        assert turn.fork_cause in (None, ForkCause.UNPROVABLE_BRIDGE)
        if turn.fork_cause is None and turn.parent is not None:
            assert turn.shared_tokens == recorder.turns[turn.parent].path_tokens
        asked = Conversation([*asked.messages, message, Message("user", "Go on.")], [TOOL])


@pytest.mark.parametrize("name", sorted(n for n, f in KNOWN.items() if f.takes_stand_ins))
def test_stand_ins_do_not_change_the_ids(family_of: Any, name: str) -> None:
    rendering = family_of(name).rendering
    call = ToolCall("c", "shell", '{"command": "ls"}')
    messages = [
        Message("system", "Be brief. " * 40),
        Message("user", "List.\n" * 60),
        Message("assistant", "Let me look. " * 40, "I want to see.", [call]),
        Message("tool", "3 files " * 50, tool_call_id="c"),
    ]
    sampled = np.array(
        [*rendering.tokenizer.encode("</think>\n\nYes."), rendering.stop_token_ids[0]], np.int32
    )
    prompt = rendering.full(Conversation(messages[:2], [TOOL]))
    found = []
    for stand_ins in (rendering.tokenizer.stand_ins, StandIns()):
        rendering._stand_ins = stand_ins
        whole = [rendering.full(Conversation(messages[:n], [TOOL])).tolist() for n in (1, 2, 4)]
        bridged = rendering.bridge(prompt, sampled, messages[3:], [TOOL], [call])
        found.append((whole, None if bridged is None else bridged.tolist()))
    assert found[0] == found[1]
    assert found[0][1] is not None


@pytest.mark.parametrize(
    ("name", "late"), [("gemma4", "<|channel>thought\nI wonder"), ("llama-3", "<|end_header_id|>")]
)
def test_sent_text_is_not_lost_if_a_late_token_would_drop_it(
    name: str, late: str, family_of: Any
) -> None:
    """An answer that is truncated in its second reasoning block; a header inside an answer."""
    family: Family = family_of(name)
    ids = family.rendering.tokenizer.encode(f"Let me look.{late}")
    message = family.rendering.parse(ids, family.generation_prompt, [TOOL], calls=True)
    assert message == Message("assistant", "Let me look.")


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.6", "qwen3.8", "nemotron-3", "qwen3"])
def test_system_messages_are_moved_only_for_templates_that_refuse_them(
    name: str, family_of: Any
) -> None:
    """Claude Code and Codex send several, also as the last message."""
    rendering = family_of(name).rendering

    def rendered(*messages: tuple[Any, str]) -> list[int]:
        conversation = Conversation([Message(*each) for each in messages], [TOOL])
        ids: list[int] = rendering.full(conversation).tolist()
        return ids

    def bridged(role: Any) -> list[int]:
        prompt = np.array(rendered(("user", "List.")), np.int32)
        sampled = np.array(rendering.tokenizer.encode("a</think>b<|im_end|>"), np.int32)
        after = rendering.bridge(prompt, sampled, [Message(role, "Go on.")], [TOOL], [])
        assert after is not None
        ids: list[int] = after.tolist()
        return ids

    sent = rendered(("system", "A."), ("system", "B."), ("user", "List."), ("system", "Now."))
    moved = rendered(("system", "A.\n\nB."), ("user", "List."), ("user", "Now."))
    assert (sent == moved) == (name != "qwen3")
    assert (bridged("system") == bridged("user")) == (name != "qwen3")
