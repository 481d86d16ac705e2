"""Conversations are exported with each sampled answer marked once; pairs begin alike."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from proxy.extras.export.protocol import Sample
from proxy.extras.export.registry import open_format
from proxy.extras.export.selection import NO_REWARD, ExportSelection, Filters
from proxy.records import Session, Turn, TurnStatus
from proxy.store.protocol import SessionFilter
from tests.proxy.conftest import RunningProxy
from tests.proxy.extras.export.trees import a_sample, a_session, recorded_trees

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}
]
CALL = '<tool_call>\n{"name": "ls", "arguments": {"path": "."}}\n</tool_call>'


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(recorded_trees())
def test_every_answer_is_marked_as_sampled_exactly_once(turns: list[Turn]) -> None:
    marked: Counter[str] = Counter()
    for row in open_format("messages").rows([a_sample(turns)]):
        assert len(row["sampled"]) == len(row["messages"])
        for message, sampled in zip(row["messages"], row["sampled"], strict=True):
            assert message["role"] == "assistant" or not sampled
            marked[message["content"]] += sampled
    done = [t for t in turns if t.status is TurnStatus.DONE and t.answer]
    assert {text for text, count in marked.items() if count} == {f"answer {t.index}" for t in done}
    assert set(marked.values()) <= {0, 1}


async def recorded(proxy: RunningProxy, reward: float, last: str) -> Sample:
    """A session that calls a tool and then says `last`."""
    session = await proxy.session()
    messages: list[dict[str, Any]] = [{"role": "user", "content": "List the files."}]
    proxy.answers(CALL)
    body = {"messages": messages, "tools": TOOLS}
    _, reply = await proxy.post(session, "chat/completions", body)
    answer = reply["choices"][0]["message"]
    call_id = answer["tool_calls"][0]["id"]
    messages += [answer, {"role": "tool", "tool_call_id": call_id, "content": "a.txt"}]
    proxy.answers(last)
    await proxy.post(session, "chat/completions", body)
    _, turns = await proxy.record(session)
    return Sample(a_session(session.trial_id, reward), turns, reward)


async def test_conversation_has_tool_calls_and_results_in_the_form_of_chat_completions(
    proxy: RunningProxy,
) -> None:
    sample = await recorded(proxy, 1.0, "One file.")
    (row,) = open_format("messages").rows([sample])
    user, call, result, answer = row["messages"]
    assert user["content"] == "List the files."
    function = call["tool_calls"][0]["function"]
    assert function == {"name": "ls", "arguments": '{"path": "."}'}
    assert result["tool_call_id"] == call["tool_calls"][0]["id"]
    assert (result["role"], result["content"]) == ("tool", "a.txt")
    assert answer["content"] == "One file."
    assert row["sampled"] == [False, True, False, True]
    assert row["tools"] == TOOLS


async def test_pair_begins_alike_and_ends_differently(proxy: RunningProxy) -> None:
    better = await recorded(proxy, 1.0, "One file: a.txt.")
    worse = await recorded(proxy, 0.0, "None.")
    (row,) = open_format("dpo").rows([better, worse])
    assert [m["role"] for m in row["prompt"]] == ["user", "assistant", "tool"]
    assert [m["content"] for m in row["chosen"]] == ["One file: a.txt."]
    assert [m["content"] for m in row["rejected"]] == ["None."]
    assert (row["chosen_reward"], row["rejected_reward"]) == (1.0, 0.0)
    assert not list(open_format("dpo").rows([better, better]))  # they do not differ


class Recorded:
    """Sessions of one task."""

    def __init__(self, *rewards: float | None) -> None:
        self.sessions = {f"t-{at}": a_session(f"t-{at}", r) for at, r in enumerate(rewards)}

    async def list_sessions(self, where: SessionFilter) -> list[Session]:
        return list(self.sessions.values())

    async def get_session(self, session_id: str) -> Session | None:
        return self.sessions.get(session_id)

    async def get_turns(self, session_id: str) -> list[Turn]:
        return []


async def test_session_that_is_removed_during_an_export_does_not_end_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = Recorded(0.0, 1.0)
    selection = ExportSelection(source, Filters(), open_format("dpo"))

    async def gone(session_id: str) -> None:
        assert session_id in source.sessions

    monkeypatch.setattr(source, "get_session", gone)
    assert [unit async for unit in selection.units()] == []
    assert selection.left_out == {"tasks with a session that was removed during the export": 1}


@pytest.mark.parametrize("name", ["dpo", "trl"])
async def test_session_without_a_reward_is_counted_once(name: str) -> None:
    selection = ExportSelection(Recorded(0.0, 1.0, None), Filters(), open_format(name))
    rewards = [sample.reward async for unit in selection.units() for sample in unit]
    assert sorted(rewards, key=str) == [0.0, 1.0]
    assert selection.left_out == {NO_REWARD: 1}


async def test_atif_document_has_observations_and_exact_tokens(proxy: RunningProxy) -> None:
    sample = await recorded(proxy, 0.5, "One file.")
    (document,) = open_format("atif").rows([sample])
    user, call, answer = document["steps"]
    assert [user["source"], call["source"], answer["source"]] == ["user", "agent", "agent"]
    (result,) = call["observation"]["results"]
    assert result["source_call_id"] == call["tool_calls"][0]["tool_call_id"]
    first, second = sample.turns
    assert call["metrics"]["completion_token_ids"] == first.sampled_ids.tolist()
    whole = [*first.prompt_ids, *first.sampled_ids, *second.prompt_ids]
    assert answer["metrics"]["prompt_token_ids"] == whole
    assert document["extra"]["reward"] == 0.5
