"""The ids that a model would have sampled to give an answer that is known as text.

Invariant: the ids begin where the prompt ends, end with the token that ends the turn (unless the
answer was truncated), and the renderer reads them as the answer. Where this cannot be shown, there
are no ids.
"""

from __future__ import annotations

from proxy.conversation.message_keys import canonical_calls
from proxy.conversation.messages import Conversation, Message, split_reasoning
from proxy.errors import RequestError
from proxy.records import Ids
from proxy.rendering.openings import after_prompt
from proxy.rendering.rendering import Rendering

_OTHER = Message("user", "…")


def answer_ids(
    rendering: Rendering,
    conversation: Conversation,
    answer: Message,
    *,
    truncated: bool = False,
    as_history: bool = False,
) -> list[int] | None:
    """The ids of the answer to the conversation, which has messages. With `as_history`, an answer
    without reasoning is written as the template writes it within a history: some templates write an
    empty block of reasoning only in the last answer.

    None: the template does not write the answer as something that the model can sample, or the
    renderer reads what it writes as another answer.
    """
    before, after = conversation.messages, []
    if as_history and not answer.reasoning:  # of which the answer's own form does not depend
        before, after = [_OTHER], [_OTHER]
        if answer.tool_calls:
            after = [Message("tool", _OTHER.text, tool_call_id=answer.tool_calls[-1].id)]
    try:
        prompt, asked, whole = (
            rendering.full(Conversation(messages, conversation.tools))
            for messages in (conversation.messages, before, [*before, answer, *after])
        )
    except RequestError:
        return None
    added = _added(rendering, asked, whole)
    end = next((at for at, token in enumerate(added) if token in rendering.closes), None)
    if not end:
        return None
    ids = added[:end] if truncated else added[: end + 1]
    return ids if reads_as(rendering, ids, prompt, conversation, answer) else None


def reads_as(
    rendering: Rendering,
    sampled: list[int],
    prompt: Ids,
    conversation: Conversation,
    answer: Message,
) -> bool:
    """Whether the renderer reads these ids as this answer. A template that has no place for
    reasoning may leave it out."""
    read = rendering.parse(sampled, prompt, conversation.callable_tools, calls=True)
    (thought, said), (reasoning, text) = split_reasoning(read), split_reasoning(answer)
    same_calls = canonical_calls(read) == canonical_calls(answer)
    return same_calls and said == text and thought in (reasoning, "")


def _added(rendering: Rendering, prompt: Ids, both: Ids) -> list[int]:
    """What the answer, and whatever the template writes after it, adds to the prompt."""
    asked, whole = prompt.tolist(), both.tolist()
    if whole[: len(asked)] == asked:
        return list(whole[len(asked) :])
    decode = rendering.tokenizer.decode
    text = after_prompt(decode(asked), decode(whole))
    return [] if text is None else rendering.tokenizer.encode(text)
