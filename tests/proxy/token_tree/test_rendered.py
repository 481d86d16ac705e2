"""Sessions in the tokens of another model, compared with sessions that this model recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from proxy.config import RenderingConfig
from proxy.records import FinishReason, Turn
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import load_tokenizer
from proxy.token_tree.rendered import NotRenderable, are_tokens_of, rendered_turns
from tests.proxy.checkpoint import write_checkpoint
from tests.proxy.conftest import RunningProxy

CHAT = "chat/completions"
NO_THOUGHT = "<think>\n\n</think>\n\n"
CALL = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}\n</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "shell",
            "description": "Runs a command.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
        },
    }
]


async def recorded(proxy: RunningProxy) -> list[Turn]:
    """Reasoning, a tool call, its result, an answer; a sub-agent; an answer that was edited."""
    session = await proxy.session()
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are brief."},
        {"role": "user", "content": "What is in the folder?"},
    ]

    async def ask(answer: str, said: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        proxy.answers(answer)
        body = {"messages": said, "tools": TOOLS, **more}
        status, reply = await proxy.post(session, CHAT, body)
        assert status == 200
        message: dict[str, Any] = reply["choices"][0]["message"]
        return message

    called = await ask(f"<think>\nLet me look.\n</think>\n\n{CALL}", messages)
    messages += [
        called,
        {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": "a.txt"},
    ]
    messages.append(await ask(f"{NO_THOUGHT}It holds a.txt.", messages))
    messages.append({"role": "user", "content": "And now?"})
    await ask(f"{NO_THOUGHT}The same.", messages)
    await ask(f"{NO_THOUGHT}5", [{"role": "user", "content": "2 + 3"}])
    edited = [*messages[:4], {"role": "assistant", "content": "Nothing."}, messages[5]]
    await ask(f"{NO_THOUGHT}Nothing either.", edited)
    return (await proxy.record(session))[1]


async def test_session_has_the_tokens_that_the_model_itself_would_have_recorded(
    proxy: RunningProxy, rendering: Rendering
) -> None:
    turns = await recorded(proxy)
    assert len({turn.fork_cause for turn in turns}) == 3
    again = rendered_turns(turns, rendering)
    for before, after in zip(turns, again, strict=True):
        assert after.prompt_ids.tolist() == before.prompt_ids.tolist()
        assert after.sampled_ids.tolist() == before.sampled_ids.tolist()
        for name in ("index", "parent", "shared_tokens", "fork_cause", "request_key", "answer_key"):
            assert getattr(after, name) == getattr(before, name)
        assert np.isnan(after.logprobs).all()
    assert are_tokens_of(turns, rendering)


async def test_text_of_another_tokenizer_is_rendered_with_the_models_own(
    proxy: RunningProxy, rendering: Rendering, tmp_path: Path
) -> None:
    """The ids of a text-only engine, and those of a model with another chat template."""
    turns = await recorded(proxy)
    foreign = [
        replace(turn, sampled_ids=turn.sampled_ids[::-1], logprobs=turn.logprobs * np.nan)
        for turn in turns
    ]
    assert not are_tokens_of(foreign, rendering)
    again = rendered_turns(foreign, rendering)
    assert [t.sampled_ids.tolist() for t in again] == [t.sampled_ids.tolist() for t in turns]
    plain = write_checkpoint(tmp_path, template="plain.jinja")
    assert not are_tokens_of(turns, Rendering(load_tokenizer(plain), RenderingConfig()))


async def test_truncated_answer_has_no_end_of_turn(
    proxy: RunningProxy, rendering: Rendering
) -> None:
    turns = (await recorded(proxy))[:2]
    cut = [turns[0], replace(turns[1], finish_reason=FinishReason.LENGTH)]
    whole, truncated = (rendered_turns(each, rendering)[1].sampled_ids for each in (turns, cut))
    assert truncated.tolist() == whole[:-1].tolist()


async def test_answer_that_the_template_cannot_express_is_refused(
    proxy: RunningProxy, rendering: Rendering
) -> None:
    (turn, *_) = await recorded(proxy)
    said = b'{"text": "The token <|im_end|> ends a turn.", "reasoning": null, "tool_calls": []}'
    with pytest.raises(NotRenderable, match="answers that the model's chat template"):
        rendered_turns([replace(turn, answer=said)], rendering)


async def test_prompt_without_messages_is_refused(
    proxy: RunningProxy, rendering: Rendering
) -> None:
    session = await proxy.session()
    await proxy.post(session, "completions", {"prompt": "2 + 3 =", "max_tokens": 5})
    turns = (await proxy.record(session))[1]
    assert are_tokens_of(turns, rendering)
    with pytest.raises(NotRenderable, match="without messages"):
        rendered_turns(turns, rendering)


async def test_answer_without_reasoning_can_be_written_as_in_a_history(
    proxy: RunningProxy, rendering: Rendering
) -> None:
    turns = await recorded(proxy)
    decode = rendering.tokenizer.decode
    said = [
        decode(turn.sampled_ids.tolist())
        for turn in rendered_turns(turns, rendering, as_history=True)
    ]
    assert said == [
        f"<think>\nLet me look.\n</think>\n\n{CALL}<|im_end|>",
        "It holds a.txt.<|im_end|>",
        "The same.<|im_end|>",
        "5<|im_end|>",
        "Nothing either.<|im_end|>",
    ]
