"""Harbor's Agent Trajectory Interchange Format (ATIF): one document per conversation.

Answers that an earlier document of the same session contains are marked as copied context and have
no tokens, so that each sampled token stands in one document.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from proxy.conversation.messages import Message, arguments_object
from proxy.extras.export.conversations import ConversationPath, content_parts, conversation_paths
from proxy.extras.export.images import data_url, images_of
from proxy.extras.export.protocol import Row, Sample
from proxy.records import Turn
from proxy.records.images import engine_ids
from proxy.token_tree.paths import prefix, prefix_images

SCHEMA = "ATIF-v1.8"


class AtifFormat:
    """ATIF documents. Steps of tools' results are the observations of the step that called. Images
    are content parts, whose paths are data URLs."""

    unit: Literal["session"] = "session"
    trains = needs_reward = False
    no_images: str | None = None

    def schema(self, pa: Any) -> Any:
        names = ("schema_version", "session_id", "trajectory_id", "agent", "steps")
        texts = {name: pa.string() for name in (*names, "final_metrics", "extra")}
        return pa.schema(texts)

    def rows(self, samples: Sequence[Sample]) -> Iterator[Row]:
        (sample,) = samples
        session = sample.session
        for number, path in enumerate(conversation_paths(sample.turns)):
            agent: Row = {
                "name": str(session.metadata.get("agent", session.profile)),
                "version": str(session.metadata.get("agent_version", "unknown")),
            }
            if path.tools:
                agent["tool_definitions"] = list(path.tools)
            yield {
                "schema_version": SCHEMA,
                "session_id": session.session_id,
                "trajectory_id": f"{session.session_id}#{number}",
                "agent": agent,
                "steps": _steps(path, sample),
                "final_metrics": _totals(path, sample.turns),
                "extra": {"reward": sample.reward, "metadata": dict(session.metadata)},
            }


def _steps(path: ConversationPath, sample: Sample) -> list[Row]:
    steps: list[Row] = []
    for at, message in enumerate(path.messages):
        if message.role == "tool" and steps and steps[-1]["source"] == "agent":
            results = steps[-1].setdefault("observation", {"results": []})["results"]
            results.append(_result(message, steps[-1], sample))
            continue
        step = _step(message, sample)
        if at in path.answers:
            _describe(step, sample.turns, path.answers[at], is_new=at in path.sampled)
        steps.append({"step_id": len(steps) + 1, **step})
    return steps


def _step(message: Message, sample: Sample) -> Row:
    if message.role != "assistant":
        source = "system" if message.role == "system" else "user"
        return {"source": source, "message": _content(message, sample)}
    step: Row = {"source": "agent", "message": message.text}
    if message.reasoning:
        step["reasoning_content"] = message.reasoning
    if message.tool_calls:
        step["tool_calls"] = [
            {
                "tool_call_id": call.id,
                "function_name": call.name,
                "arguments": arguments_object(call),
            }
            for call in message.tool_calls
        ]
    return step


def _describe(step: Row, turns: Sequence[Turn], index: int, *, is_new: bool) -> None:
    """Adds what is recorded of the turn that sampled the step."""
    turn = turns[index]
    step["timestamp"] = datetime.fromtimestamp(turn.started_at, UTC).isoformat()
    step["llm_call_count"] = 1
    if not is_new:
        step["is_copied_context"] = True
        return
    prompt = prefix(turns, turn.parent, turn.shared_tokens, turn.prompt_ids)
    images = prefix_images(turns, index, turn.prompt_tokens)
    step["metrics"] = {
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": len(turn.sampled_ids),
        "cached_tokens": turn.shared_tokens,
        "prompt_token_ids": engine_ids(prompt, images).tolist(),
        "completion_token_ids": turn.sampled_ids.tolist(),
        "logprobs": turn.logprobs.tolist(),
    }


def _content(message: Message, sample: Sample) -> str | list[Row]:
    """The text, or the parts of a message with images."""
    images = iter(images_of(sample, [message]))
    parts = content_parts(message)
    if not any(part["type"] == "image" for part in parts):
        return message.text
    for part in parts:
        if part["type"] == "image":
            image = next(images)
            part["source"] = {"media_type": image.media_type, "path": data_url(image)}
    return parts


def _result(message: Message, step: Row, sample: Sample) -> Row:
    known = {call["tool_call_id"] for call in step.get("tool_calls", ())}
    found = message.tool_call_id if message.tool_call_id in known else None
    return {"source_call_id": found, "content": _content(message, sample)}


def _totals(path: ConversationPath, turns: Sequence[Turn]) -> Row:
    own = [turns[index] for index in path.answers.values()]
    return {
        "total_prompt_tokens": sum(turn.prompt_tokens for turn in own),
        "total_completion_tokens": sum(len(turn.sampled_ids) for turn in own),
        "total_steps": len(own),
    }
