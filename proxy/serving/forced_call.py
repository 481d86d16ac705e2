"""A tool call that the agent requires and the model did not make by itself.

A model that reasons before it calls is not given the beginning of a call, because that would
disable its reasoning. If its answer then ends without a call, the proxy begins one after what the
model said: in a turn of its own, whose prompt is the recorded answer without its end-of-turn token,
followed by the beginning of a call. Invariant: what the model said stays recorded as it was
sampled; the beginning of the call belongs to a prompt, so it is never trained.
"""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from proxy.conversation import ConversationKey
from proxy.records import FinishReason, ForkCause, TurnStatus
from proxy.rendering.rendering import Rendering
from proxy.serving.asked import Asked, required_tool
from proxy.token_tree.tree import Node, Placement, TokenTree
from proxy.wire.dialect import Outcome


def lacks_call(asked: Asked, said: Outcome) -> bool:
    """Whether the model ended its answer without the call that the agent requires."""
    if asked.request.options.forced is None or len(asked.opening) or said.message.tool_calls:
        return False
    return said.finish_reason is FinishReason.STOP and said.stop_string is None


def place_call(
    asked: Asked, said: Outcome, tree: TokenTree, rendering: Rendering
) -> tuple[Asked, Placement]:
    """The request for the call that continues `said`, and its place in the tree."""
    node = tree.nodes[said.turn]
    spoken = rendering.before_stop(node.sampled_ids.tolist())
    tool = required_tool(asked.request)
    kept, begun = rendering.call_after(spoken, tree.prompt_end(node), tool)
    shared = node.prompt_tokens + kept
    options = asked.request.options
    if options.max_tokens is not None:
        options = replace(options, max_tokens=max(1, options.max_tokens - said.completion_tokens))
    opening = np.array([*spoken[:kept], *begun], np.int32)
    continued = replace(
        asked,
        request=replace(asked.request, options=options),
        request_key=_key_after(asked, said.turn),
        opening=opening,
    )
    parent = tree.owner(node.index, shared)
    prompt = tree.prompt(parent, shared, opening[kept:])
    images, cause = tree.images(parent, shared), ForkCause.CALL_REQUIRED
    return continued, Placement(parent, shared, opening[kept:], prompt, cause, images)


def calls_after(turn: int, asked: Asked, tree: TokenTree) -> list[Node]:
    """The turns that continued the answer of a turn with the required call."""
    if asked.request.options.forced is None:
        return []
    return tree.same_requests(_key_after(asked, turn))


def call_or_answer(turn: int, tree: TokenTree) -> int:
    """The turn of the required call that continued the answer of `turn`; `turn` if none did."""
    calls = tree.same_requests(tree.nodes[turn].request_key.begun("after", str(turn)))
    made = [n.index for n in calls if n.answer_key is not None and n.status is not TurnStatus.CUT]
    return made[-1] if made else turn


def _key_after(asked: Asked, turn: int) -> ConversationKey:
    key = asked.request_key
    assert isinstance(key, ConversationKey)
    return key.begun("after", str(turn))


def joined(said: Outcome, called: Outcome) -> Outcome:
    """Both halves as the one answer that the agent gets. Its tokens are the sampled ones, without
    the beginning of the call."""
    halves = [half.sampled_ids for half in (said, called) if half.sampled_ids is not None]
    return replace(
        called,
        prompt_tokens=said.prompt_tokens,
        cached_tokens=said.cached_tokens,
        completion_tokens=said.completion_tokens + called.completion_tokens,
        reasoning_tokens=said.reasoning_tokens + called.reasoning_tokens,
        tokens=[*said.tokens, *called.tokens],
        prompt_ids=said.prompt_ids,
        sampled_ids=np.concatenate(halves) if halves else None,
    )
