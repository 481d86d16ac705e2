"""The choice of a checkpoint's renderer, and templates that no renderer agrees with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from renderers import config_from_name, create_renderer
from renderers.base import Renderer

from proxy.config import RenderingConfig
from proxy.conversation import Conversation, Message
from proxy.errors import ConfigurationError, RequestError
from proxy.records import ForkCause
from proxy.rendering.families import Family
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import Tokenizer, load_tokenizer
from tests.proxy.checkpoint import write_checkpoint
from tests.proxy.token_tree.test_tree import (
    ANSWERS,
    CALL,
    Recorder,
    conversation,
    extended,
    results,
)


def rendering_of(folder: Path, template: str, **config: str) -> Rendering:
    checkpoint = write_checkpoint(folder, template=template)
    return Rendering(load_tokenizer(checkpoint), RenderingConfig(**config))


def test_renderer_that_agrees_with_the_template_is_chosen(rendering: Rendering) -> None:
    assert rendering.name == "qwen3"


def test_template_without_a_renderer_is_used_itself(tmp_path: Path) -> None:
    unknown = rendering_of(tmp_path, "plain.jinja")
    assert unknown.name == "template"
    ids = unknown.full(Conversation([Message("user", "Hi.")]))
    assert unknown.tokenizer.decode(ids) == "[user]\nHi.<|im_end|>\n[assistant]\n"


def test_turns_of_a_template_are_joined_if_provable(tmp_path: Path) -> None:
    recorder = Recorder(rendering_of(tmp_path, "plain.jinja"))
    asked = conversation("List the files.")
    for answer in (*ANSWERS, CALL):
        turn, message = recorder.ask(asked, answer)
        assert turn.fork_cause is None
        assert turn.parent == (turn.index - 1 if turn.index else None)
        asked = extended(asked, message, *results(message))
    assert message.tool_calls


def test_truncated_answer_of_a_template_gets_its_missing_end_of_turn(tmp_path: Path) -> None:
    recorder = Recorder(rendering_of(tmp_path, "plain.jinja"))
    asked = conversation("List the files.")
    _, message = recorder.ask(asked, "Let me", close=False)
    turn, _ = recorder.ask(extended(asked, message, Message("user", "Go on.")), "Done.")
    assert recorder.rendering.tokenizer.decode(turn.prompt_ids) == (
        "<|im_end|>\n[user]\nGo on.<|im_end|>\n[assistant]\n"
    )


def test_template_that_changes_its_beginning_forks(tmp_path: Path) -> None:
    recorder = Recorder(rendering_of(tmp_path, "counting.jinja"))
    asked = conversation("List the files.")
    _, message = recorder.ask(asked, "Let me look.")
    turn, _ = recorder.ask(extended(asked, message, Message("user", "Go on.")), "Done.")
    assert turn.fork_cause is ForkCause.UNPROVABLE_BRIDGE
    text = recorder.rendering.tokenizer.decode(recorder.tree.path(turn.index))
    assert text.startswith("4 messages\n")


def test_renderer_can_be_set_by_name(tmp_path: Path) -> None:
    assert rendering_of(tmp_path, "plain.jinja", renderer="qwen3").name == "qwen3"


@pytest.mark.parametrize("name", ["kimi-k2", "no-such-renderer", "gpt-oss"])
def test_renderer_of_another_vocabulary_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        rendering_of(tmp_path, "plain.jinja", renderer=name)


def test_folder_that_is_not_a_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="cannot read"):
        load_tokenizer(tmp_path)


def test_conversation_that_the_template_refuses_is_a_request_error(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    checkpoint = write_checkpoint(tmp_path / "t", template="plain.jinja")
    template = "{{ raise_exception('roles must alternate') }}"
    (checkpoint / "chat_template.jinja").write_text(template)
    refusing = Rendering(load_tokenizer(checkpoint), RenderingConfig())
    with pytest.raises(RequestError, match="roles must alternate"):
        refusing.full(Conversation([Message("user", "Hi.")]))


def _qwen3(tokenizer: Tokenizer, template_kwargs: dict[str, Any]) -> Renderer:
    return create_renderer(tokenizer, config_from_name("qwen3"))


MINE = Family(
    "mine", build=_qwen3, separators=("<think>", "</think>", "<tool_call>", "</tool_call>")
)


def test_family_from_outside_the_package_is_loaded_by_its_import_path(tmp_path: Path) -> None:
    path = "tests.proxy.rendering.test_selection:MINE"
    rendering = rendering_of(tmp_path, "qwen3.jinja", renderer=path)
    assert (rendering.name, rendering.markers is not None) == ("mine", True)
    ids = rendering.full(Conversation([Message("user", "Hi.")]))
    assert rendering.tokenizer.decode(ids).startswith("<|im_start|>user")


@pytest.mark.parametrize("path", ["nowhere:X", "proxy.rendering.families:FAMILIES"])
def test_import_path_of_something_else_than_a_family_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(ConfigurationError, match=r"rendering\.renderer: "):
        rendering_of(tmp_path, "qwen3.jinja", renderer=path)


@pytest.mark.parametrize("between", ["\\n", "\\n\\n", ""])
def test_calls_of_a_template_are_joined_as_it_writes_them(tmp_path: Path, between: str) -> None:
    checkpoint = write_checkpoint(tmp_path / "t", template="plain.jinja")
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for call in m.tool_calls or [] %}{% if not loop.first %}{{ 'BETWEEN' }}{% endif %}"
        "<tool_call>\n<function={{ call.function.name }}>\n</function>\n</tool_call>"
        "{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (checkpoint / "chat_template.jinja").write_text(template.replace("BETWEEN", between))
    tags = Rendering(load_tokenizer(checkpoint), RenderingConfig()).family.tags
    assert tags is not None
    assert tags.between_calls == tags.between_calls_after_text == between.replace("\\n", "\n")
