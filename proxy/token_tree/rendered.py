"""A recorded session in the tokens of another model: the turns that the model would have recorded
if it had given the same answers to the same requests.

Each answered request is placed in a new token tree by the same code that places the calls of a live
agent, so that system prompts, tools, tool results, shared prefixes and forks are those of a session
of that model. Invariant: the ids of an answer are what the model would have sampled
(`proxy.rendering.answers`); they carry no log-probabilities, because nothing sampled them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from proxy.conversation.message_keys import conversation_keys
from proxy.conversation.messages import load_answer
from proxy.conversation.recorded import load_conversation
from proxy.errors import RequestError
from proxy.records import FinishReason, Ids, Turn, TurnStatus
from proxy.rendering.answers import answer_ids, reads_as
from proxy.rendering.rendering import Rendering
from proxy.token_tree.paths import prefix
from proxy.token_tree.tree import TokenTree


class NotRenderable(Exception):
    """A session cannot be rendered for a model. The message is a reason that several sessions can
    have in common."""


def rendered_turns(
    turns: Sequence[Turn],
    rendering: Rendering,
    *,
    follows: bool = False,
    as_history: bool = False,
) -> list[Turn]:
    """The session's answered turns in the tokens of `rendering`, with new indices.

    `follows` is that of the session's profile; `as_history` is that of `answer_ids`. `logprobs` are
    NaN and `versions` empty.

    Raises:
        NotRenderable: a request was recorded without its messages, or an answer cannot be written
            in the model's chat template.
    """
    tree, rendered = TokenTree(follows=follows), []
    for turn in turns:
        if turn.status is TurnStatus.DONE and turn.answer:
            rendered.append(_rendered(turns, turn, tree, rendering, as_history))
            tree.begin(rendered[-1])
            tree.commit(rendered[-1])
    return rendered


def are_tokens_of(turns: Sequence[Turn], rendering: Rendering) -> bool:
    """Whether the recorded ids are those of this model: its renderer gives the ids of each prompt
    that continues nothing, and reads the ids of each answer as that answer.

    False also for the ids of an engine that accepts and returns only text, which are not those that
    it sampled.
    """
    return all(
        _is_token_turn(turns, turn, rendering) for turn in turns if turn.status is TurnStatus.DONE
    )


def _is_token_turn(turns: Sequence[Turn], turn: Turn, rendering: Rendering) -> bool:
    prompt, sampled = _prompt(turns, turn), turn.sampled_ids
    highest = max(int(ids.max(initial=0)) for ids in (prompt, sampled))
    if not np.isfinite(turn.logprobs).all() or highest >= rendering.tokenizer.vocab_size:
        return False
    if not turn.answer:
        return not len(sampled)
    answer, recorded = load_answer(turn.answer), load_conversation(turns, turn.index)
    if recorded is None:  # a prompt without messages
        spoken = rendering.before_stop(sampled.tolist())
        return rendering.tokenizer.decode(spoken).strip() == answer.text.strip()
    conversation = recorded.conversation
    if turn.parent is None and not _same(rendering.full(conversation), prompt):
        return False
    return reads_as(rendering, sampled.tolist(), prompt, conversation, answer)


def _rendered(
    turns: Sequence[Turn], turn: Turn, tree: TokenTree, rendering: Rendering, as_history: bool
) -> Turn:
    recorded = load_conversation(turns, turn.index)
    if recorded is None:
        raise NotRenderable("requests without messages, whose ids are of another tokenizer")
    conversation, answer = recorded.conversation, load_answer(turn.answer)
    keys = conversation_keys(conversation, with_reasoning=tree.follows)
    try:
        placement = tree.place(conversation, keys, rendering)
    except RequestError as error:
        raise NotRenderable("requests that the model's chat template refuses") from error
    truncated = turn.finish_reason is FinishReason.LENGTH
    ids = answer_ids(rendering, conversation, answer, truncated=truncated, as_history=as_history)
    if ids is None:
        raise NotRenderable("answers that the model's chat template cannot express")
    return Turn(
        session_id=turn.session_id,
        index=len(tree),
        parent=placement.parent,
        shared_tokens=placement.shared_tokens,
        fork_cause=placement.cause,
        prompt_ids=placement.prompt_ids,
        request_key=keys[-1].stored(),
        sampling=turn.sampling,
        dialect=turn.dialect,
        request=tree.new_messages(conversation, keys),
        sampled_ids=np.array(ids, np.int32),
        logprobs=np.full(len(ids), np.nan, np.float32),
        finish_reason=turn.finish_reason,
        status=TurnStatus.DONE,
        answer_key=keys[-1].answered(answer, with_reasoning=tree.follows).stored(),
        answer=turn.answer,
        agent_id=turn.agent_id,
    )


def _prompt(turns: Sequence[Turn], turn: Turn) -> Ids:
    return prefix(turns, turn.parent, turn.shared_tokens, turn.prompt_ids)


def _same(one: Ids, other: Ids) -> bool:
    return len(one) == len(other) and bool((one == other).all())
