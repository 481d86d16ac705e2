from __future__ import annotations

import pytest

from harbor_sdk.agents import connect
from harbor_sdk.models import AgentSpec

URL, KEY = "http://127.0.0.1:8000/t-1/v1", "sk-1"


def test_claude_code_gets_base_url_without_v1() -> None:
    agent = connect(AgentSpec(name="claude-code", model_name="policy"), URL, KEY)
    assert agent.env == {
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:8000/t-1",
        "ANTHROPIC_API_KEY": KEY,
    }
    assert agent.model_name == "anthropic/policy"


@pytest.mark.parametrize("name", ["codex", "mini-swe-agent", "swe-agent", "openhands", None])
def test_other_agents_get_openai_variables(name: str | None) -> None:
    agent = connect(AgentSpec(name=name, model_name="policy"), URL, KEY)
    assert agent.env["OPENAI_BASE_URL"] == agent.env["LLM_BASE_URL"] == URL
    assert agent.env["OPENAI_API_KEY"] == agent.env["LLM_API_KEY"] == KEY
    assert agent.model_name == "openai/policy"


def test_terminus_gets_arguments_and_a_key_that_harbor_removes() -> None:
    agent = connect(AgentSpec(name="terminus-2", model_name="openai/policy"), URL, KEY)
    assert agent.kwargs["api_base"] == URL
    assert agent.kwargs["llm_call_kwargs"]["api_key"] == KEY
    assert agent.env["OPENAI_API_KEY"] == KEY  # Harbor scrubs the values of such variables


def test_values_of_the_caller_are_kept() -> None:
    given = AgentSpec(
        name="terminus-2",
        model_name="other/m",
        kwargs={"api_base": "http://mine", "llm_call_kwargs": {"top_p": 0.5}},
        env={"OPENAI_API_KEY": "mine"},
    )
    agent = connect(given, URL, KEY)
    assert agent.model_name == "other/m"
    assert agent.kwargs["api_base"] == "http://mine"
    assert agent.kwargs["llm_call_kwargs"] == {"api_key": KEY, "top_p": 0.5}
    assert agent.env["OPENAI_API_KEY"] == "mine"
    assert given.kwargs["llm_call_kwargs"] == {"top_p": 0.5}
