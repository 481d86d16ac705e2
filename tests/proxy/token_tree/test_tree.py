"""A request extends a recorded path exactly, or forks with a cause."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from proxy.conversation.message_keys import conversation_keys, raw_key
from proxy.conversation.messages import (
    Conversation,
    Message,
    ToolCall,
    dump_answer,
    normalised,
)
from proxy.records import FinishReason, ForkCause, Turn, TurnStatus, VersionSpan
from proxy.rendering.rendering import Rendering
from proxy.token_tree.paths import common_prefix
from proxy.token_tree.tree import Placement, TokenTree

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "shell", "parameters": {}}}
CALL = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}\n</tool_call>'
ANSWERS = (
    "Let me look.",
    "Done, thank you.",
    f"Let me look.\n{CALL}",
    CALL + "\n" + CALL,
    "<think>\nI want to see.\n</think>\n\nLet me look.",
)


@dataclass
class Recorder:
    """Places and records requests like the proxy, without an engine or a store."""

    rendering: Rendering
    follows: bool = False
    turns: list[Turn] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tree = TokenTree(follows=self.follows)

    def place(self, conversation: Conversation) -> Placement:
        keys = conversation_keys(conversation, with_reasoning=self.follows)
        return self.tree.place(conversation, keys, self.rendering)

    def ask(
        self, conversation: Conversation, answer: str, *, close: bool = True
    ) -> tuple[Turn, Message]:
        keys = conversation_keys(conversation, with_reasoning=self.follows)
        placed = self.tree.place(conversation, keys, self.rendering)
        tokenizer = self.rendering.tokenizer
        ids = tokenizer.encode(answer + ("<|im_end|>" if close else ""))
        prompt = self.tree.prompt(placed.parent, placed.shared_tokens, placed.prompt_ids)
        assert np.array_equal(placed.prompt, prompt)
        message = self.rendering.parse(ids, prompt, conversation.tools, calls=True)
        turn = Turn(
            session_id="s",
            index=len(self.turns),
            parent=placed.parent,
            shared_tokens=placed.shared_tokens,
            fork_cause=placed.cause,
            prompt_ids=placed.prompt_ids,
            request_key=keys[-1].stored(),
            sampling={},
        )
        self.tree.begin(turn)
        turn = replace(
            turn,
            sampled_ids=np.array(ids, np.int32),
            logprobs=np.zeros(len(ids), np.float32),
            versions=(VersionSpan(0, 0, len(ids)),),
            finish_reason=FinishReason.STOP,
            status=TurnStatus.DONE,
            answer=dump_answer(message),
            answer_key=keys[-1].answered(message, with_reasoning=self.follows).stored(),
        )
        self.tree.commit(turn)
        self.turns.append(turn)
        self.prompts.append(prompt.tolist())
        return turn, message


def conversation(*texts: str, tools: bool = True, system: str = "Be brief.") -> Conversation:
    messages = [Message("system", system)] if system else []
    messages += [Message("user", text) for text in texts]
    return Conversation(messages, [TOOL] if tools else [])


def extended(before: Conversation, *messages: Message) -> Conversation:
    return Conversation([*copy.deepcopy(before.messages), *messages], before.tools)


def results(answer: Message) -> list[Message]:
    if not answer.tool_calls:
        return [Message("user", "Go on.")]
    return [Message("tool", "a b c", tool_call_id=call.id) for call in answer.tool_calls]


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[int, str, str, bool]]:
    """(earlier turn to continue, what the agent does to its history, the answer, closed)"""
    habit = st.sampled_from(
        ["faithful"] * 6 + ["edited", "arguments", "system", "no reasoning", "foreign", "retry"]
    )
    step = st.tuples(
        st.integers(0, 30), habit, st.sampled_from(ANSWERS), st.sampled_from([True] * 4 + [False])
    )
    return draw(st.lists(step, min_size=1, max_size=8))


def changed(before: Conversation, habit: str) -> Conversation:
    after = copy.deepcopy(before)
    answers = [m for m in after.messages if m.role == "assistant"]
    if habit == "edited":
        after.messages[1].text += " Please."
    elif habit == "system":
        after.messages[0].text += " And kind."
    elif habit == "foreign":
        after.messages.insert(2, Message("assistant", "Got it."))
        after.messages.insert(3, Message("user", "Well."))
    elif habit == "no reasoning":
        for message in answers:
            message.reasoning = None
    elif habit == "arguments":
        for message in answers:
            for call in message.tool_calls:
                call.arguments = '{"command":   "rm"}'
    return after


@pytest.mark.parametrize("follows", [False, True])
def test_every_prompt_extends_or_forks_exactly(rendering: Rendering, follows: bool) -> None:
    @settings(max_examples=60, deadline=None)
    @given(steps())
    def check(plan: list[tuple[int, str, str, bool]]) -> None:
        recorder = Recorder(rendering, follows)
        histories = [conversation("List the files.")]
        for origin, habit, answer, close in plan:
            asked = histories[origin % len(histories)]
            if habit != "retry":
                asked = changed(asked, habit)
            _, message = recorder.ask(asked, answer, close=close)
            histories.append(extended(asked, message, *results(message)))
        for turn, prompt in zip(recorder.turns, recorder.prompts, strict=True):
            path = recorder.tree.path(turn.index)
            assert path.tolist() == [*prompt, *turn.sampled_ids.tolist()]
            if turn.parent is None:
                assert turn.shared_tokens == 0
                continue
            parent = recorder.turns[turn.parent]
            parents_path = recorder.tree.path(turn.parent)
            assert parent.shared_tokens < turn.shared_tokens <= parent.path_tokens
            assert common_prefix(parents_path, path) >= turn.shared_tokens
            if turn.shared_tokens < parent.path_tokens:
                assert turn.fork_cause is not None
        rebuilt = TokenTree(recorder.turns, follows=follows)
        for history in histories:
            keys = conversation_keys(history, with_reasoning=follows)
            again = rebuilt.place(history, keys, rendering)
            first = recorder.place(history)
            assert (again.parent, again.shared_tokens, again.cause) == (
                first.parent,
                first.shared_tokens,
                first.cause,
            )
            assert again.prompt_ids.tolist() == first.prompt_ids.tolist()

    check()


def test_unchanged_history_forms_one_path(rendering: Rendering) -> None:
    recorder = Recorder(rendering)
    asked = conversation("List the files.")
    for answer in (*ANSWERS, *ANSWERS):
        turn, message = recorder.ask(asked, answer)
        assert turn.fork_cause is None
        assert turn.parent == (turn.index - 1 if turn.index else None)
        asked = extended(asked, message, *results(message))


@pytest.mark.parametrize(
    "rewrite",
    [
        lambda call: ToolCall("other-id", call.name, call.arguments),
        lambda call: ToolCall(call.id, call.name, '{ "command" :\n"ls" }'),
    ],
)
def test_ids_and_formatting_of_a_call_do_not_matter(rendering: Rendering, rewrite: Any) -> None:
    recorder = Recorder(rendering)
    asked = conversation("List the files.")
    _, message = recorder.ask(asked, CALL)
    message.tool_calls = [rewrite(call) for call in message.tool_calls]
    placed = recorder.place(extended(asked, message, *results(message)))
    assert (placed.parent, placed.cause) == (0, None)


def cause(rendering: Rendering, habit: str, *, follows: bool = False) -> Placement:
    recorder = Recorder(rendering, follows)
    asked = conversation("List the files.")
    answer = f"<think>\nI want to see.\n</think>\n\nLet me look.\n{CALL}"
    _, message = recorder.ask(asked, answer)
    return recorder.place(changed(extended(asked, message, *results(message)), habit))


def test_changed_arguments_fork_inside_the_answer(rendering: Rendering) -> None:
    placed = cause(rendering, "arguments")
    assert placed.cause is ForkCause.TOOL_ARGUMENTS
    assert placed.parent == 0


def test_changed_system_forks(rendering: Rendering) -> None:
    assert cause(rendering, "system").cause is ForkCause.SYSTEM_CHANGED


def test_changed_tools_fork(rendering: Rendering) -> None:
    recorder = Recorder(rendering)
    asked = conversation("List the files.")
    _, message = recorder.ask(asked, "Let me look.")
    after = extended(asked, message, *results(message))
    after.tools = []
    assert recorder.place(after).cause is ForkCause.TOOLS_CHANGED


def test_dropped_reasoning_is_kept_or_forks_by_profile(rendering: Rendering) -> None:
    assert cause(rendering, "no reasoning").cause is None
    followed = cause(rendering, "no reasoning", follows=True)
    assert followed.cause is ForkCause.REASONING_DROPPED


def test_answer_that_was_not_sampled_becomes_prompt(rendering: Rendering) -> None:
    recorder = Recorder(rendering)
    asked = conversation("List the files.")
    _, message = recorder.ask(asked, "Let me look.")
    after = extended(
        asked,
        message,
        Message("user", "Wait."),
        Message("assistant", "Got it. Thanks for the context!"),
        Message("user", "Go on."),
    )
    placed = recorder.place(after)
    assert placed.cause is ForkCause.FOREIGN_ASSISTANT
    assert (placed.parent, placed.shared_tokens) == (0, recorder.turns[0].path_tokens)
    assert "Got it." in rendering.tokenizer.decode(placed.prompt_ids)


@pytest.mark.parametrize("extends", [True, False])
@pytest.mark.parametrize(
    ("text", "cause"), [("-1: no file", ForkCause.EDITED), (None, ForkCause.FOREIGN_ASSISTANT)]
)
def test_cause_of_a_fork_does_not_depend_on_the_renderer(
    rendering: Rendering,
    monkeypatch: pytest.MonkeyPatch,
    text: str | None,
    cause: ForkCause,
    extends: bool,
) -> None:
    """A result that comes back changed (`text`), or a history that goes on otherwise, with answers
    after it: with a renderer that can append to the recorded answer, and with one that cannot."""
    recorder = Recorder(rendering)
    asked = conversation("List the files.")
    _, called = recorder.ask(asked, f"Look.\n{CALL}")
    after = extended(asked, called, *results(called))
    if text is None:
        after.messages.append(Message("assistant", "Mine."))
    else:
        _, message = recorder.ask(after, "Done.")
        after.messages[-1] = Message("tool", text, tool_call_id=called.tool_calls[0].id)
        after.messages.append(message)
    if not extends:
        monkeypatch.setattr(Rendering, "suffix_after", lambda *_: None)
    placed = recorder.place(extended(after, Message("user", "Go on.")))
    assert placed.cause is cause


def test_summary_of_the_history_is_a_compaction(rendering: Rendering) -> None:
    recorder = Recorder(rendering)
    summary = "The files were listed, and what is left to do is to say what each of them holds."
    recorder.ask(conversation("List the files.", "Now summarise."), summary)
    placed = recorder.place(conversation(f"This session goes on from a summary:\n{summary}"))
    assert placed.cause is ForkCause.COMPACTION


def test_sub_agent_is_a_new_conversation(rendering: Rendering) -> None:
    recorder = Recorder(rendering)
    recorder.ask(conversation("List the files."), "Let me look.")
    placed = recorder.place(conversation("Find the sum.", tools=False, system="You are a helper."))
    assert placed.cause is ForkCause.NEW_CONVERSATION


def test_missing_answer_is_a_roll_back(rendering: Rendering) -> None:
    recorder = Recorder(rendering)
    asked = conversation("List the files.")
    recorder.ask(asked, "No call.")
    placed = recorder.place(extended(asked, Message("user", "Format error.")))
    assert placed.cause is ForkCause.ROLLED_BACK


def test_split_calls_of_one_turn_are_one_message(rendering: Rendering) -> None:
    recorder = Recorder(rendering)
    asked = conversation("List the files.")
    _, message = recorder.ask(asked, f"Let me look.\n{CALL}\n{CALL}")
    first, second = message.tool_calls
    split = normalised(
        [
            Message("assistant", message.text, None, [first]),
            Message("assistant", "", None, [second]),
        ]
    )
    placed = recorder.place(extended(asked, *split, *results(message)))
    assert (placed.parent, placed.cause) == (0, None)


def raw_turn(index: int, prompt: str, answer: str) -> Turn:
    """A turn of Completions."""
    return Turn(
        session_id="s",
        index=index,
        parent=None,
        shared_tokens=0,
        fork_cause=None,
        prompt_ids=np.array([1], np.int32),
        request_key=raw_key(prompt).stored(),
        sampling={},
        sampled_ids=np.array([2], np.int32),
        status=TurnStatus.DONE,
        answer_key=raw_key(prompt + answer).stored(),
    )


def test_answer_may_be_recorded_while_a_long_text_is_placed(rendering: Rendering) -> None:
    """A long text is placed in a thread, and answers are recorded in the event loop."""
    tree = TokenTree([raw_turn(0, "a", "b"), raw_turn(1, "ab", "c")])

    class Text(str):
        def __len__(self) -> int:
            if len(tree) == 2:
                tree.begin(raw_turn(2, "abc", "d"))
                tree.commit(raw_turn(2, "abc", "d"))
            return super().__len__()

    text = Text("A text that is not recorded.")
    assert tree.place(Conversation([], raw=text), [raw_key(str(text))], rendering).parent is None
