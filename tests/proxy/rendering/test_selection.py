"""Which renderer a checkpoint gets, and what happens to a template that none of them speaks."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.config import RenderingConfig
from proxy.conversation import Conversation, Message
from proxy.errors import ConfigurationError, RequestError
from proxy.records import ForkCause
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import load_tokenizer
from tests.proxy.checkpoint import write_checkpoint
from tests.proxy.test_token_tree import ANSWERS, CALL, Recorder, conversation, extended, results


def rendering_of(folder: Path, template: str, **config: str) -> Rendering:
    checkpoint = write_checkpoint(folder, template=template)
    return Rendering(load_tokenizer(checkpoint), RenderingConfig(**config))


def test_a_template_gets_the_renderer_that_agrees_with_it(rendering: Rendering) -> None:
    assert rendering.name == "qwen3"


def test_an_unknown_template_is_rendered_as_it_is(tmp_path: Path) -> None:
    unknown = rendering_of(tmp_path, "plain.jinja")
    assert unknown.name == "template"
    ids = unknown.full(Conversation([Message("user", "Hi.")]))
    assert unknown.tokenizer.decode(ids) == "[user]\nHi.<|im_end|>\n[assistant]\n"


def test_its_turns_are_joined_where_that_can_be_proven(tmp_path: Path) -> None:
    recorder = Recorder(rendering_of(tmp_path, "plain.jinja"))
    asked = conversation("List the files.")
    for answer in (*ANSWERS, CALL):
        turn, message = recorder.ask(asked, answer)
        assert turn.fork_cause is None
        assert turn.parent == (turn.index - 1 if turn.index else None)
        asked = extended(asked, message, *results(message))
    assert message.tool_calls


def test_its_truncated_answers_get_the_close_that_they_lack(tmp_path: Path) -> None:
    recorder = Recorder(rendering_of(tmp_path, "plain.jinja"))
    asked = conversation("List the files.")
    _, message = recorder.ask(asked, "Let me", close=False)
    turn, _ = recorder.ask(extended(asked, message, Message("user", "Go on.")), "Done.")
    assert recorder.rendering.tokenizer.decode(turn.prompt_ids) == (
        "<|im_end|>\n[user]\nGo on.<|im_end|>\n[assistant]\n"
    )


def test_a_template_that_changes_its_beginning_forks(tmp_path: Path) -> None:
    recorder = Recorder(rendering_of(tmp_path, "counting.jinja"))
    asked = conversation("List the files.")
    _, message = recorder.ask(asked, "Let me look.")
    turn, _ = recorder.ask(extended(asked, message, Message("user", "Go on.")), "Done.")
    assert turn.fork_cause is ForkCause.UNPROVABLE_BRIDGE
    text = recorder.rendering.tokenizer.decode(recorder.tree.path(turn.index))
    assert text.startswith("4 messages\n")


def test_a_renderer_can_be_named(tmp_path: Path) -> None:
    assert rendering_of(tmp_path, "plain.jinja", renderer="qwen3").name == "qwen3"


@pytest.mark.parametrize("name", ["kimi-k2", "no-such-renderer", "gpt-oss"])
def test_a_renderer_of_another_vocabulary_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        rendering_of(tmp_path, "plain.jinja", renderer=name)


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_tokenizer(tmp_path)


def test_a_conversation_that_the_template_refuses_is_the_callers_fault(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    checkpoint = write_checkpoint(tmp_path / "t", template="plain.jinja")
    template = "{{ raise_exception('roles must alternate') }}"
    (checkpoint / "chat_template.jinja").write_text(template)
    refusing = Rendering(load_tokenizer(checkpoint), RenderingConfig())
    with pytest.raises(RequestError, match="roles must alternate"):
        refusing.full(Conversation([Message("user", "Hi.")]))
