"""Claude Code and Codex search the web: by the proxy's backend, and without one they go on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agent_loop.records import RolloutStatus
from tests.e2e.agents.model import DONE, call, offered_tools, shell_call
from tests.e2e.agents.test_agents import example, pytestmark, trial
from tests.e2e.agents.test_hard_cases import plays
from tests.proxy.conftest import RunningProxy, StartProxy

__all__ = ["pytestmark"]
FOUND = "Otters float on their backs."
SIDE_CALL = "performing a web search tool use"


async def search(query: str, tool: Mapping[str, Any]) -> list[dict[str, str]]:
    return [{"title": "Otters", "url": "https://example.org/otters", "text": FOUND}]


def policy(prompt: str) -> str:
    """Searches by the agent's own means, writes down whether there was a result, and ends."""
    last = prompt.rpartition("<|im_start|>user")[2]
    if SIDE_CALL in prompt:
        return call("web_search", {"query": "otters"}) if "<tool_response>" not in last else FOUND
    done = prompt.count("<tool_response>\n")
    tools = offered_tools(prompt)
    if done == 0:
        name = "WebSearch" if "WebSearch" in tools else "web_search"
        return call(name, {"query": "otters"})
    if done == 1:
        shell = next(name for name in ("Bash", "exec_command") if name in tools)
        word = "hi" if FOUND in prompt else "none"
        return shell_call(shell, f"echo {word} > out.txt", tools)
    return DONE


AGENTS = {
    "claude_code": (),
    "codex": ("-c", 'web_search="live"'),
}


def command(name: str) -> Any:
    """Claude Code with all its tools; Codex with its search switched on."""
    found = example(name)
    argv = [part for part in found.argv if part != "--bare"]
    return found.model_copy(update={"argv": (*argv[:-1], *AGENTS[name], argv[-1])})


async def causes(proxy: RunningProxy, trial_id: str) -> list[str]:
    _, turns = await proxy.control.get_turns(trial_id)
    return [str(turn.fork_cause) for turn in turns if turn.fork_cause is not None]


@pytest.mark.parametrize("with_backend", [True, False])
@pytest.mark.parametrize("name", AGENTS)
async def test_agent_searches_the_web(
    start_proxy: StartProxy, tmp_path: Path, name: str, with_backend: bool
) -> None:
    backend = {"web_search": "tests.e2e.agents.test_web_search:search"} if with_backend else {}
    proxy = await start_proxy(max_context_tokens=131_072, tools=backend)
    plays(proxy, policy)
    word = "hi" if with_backend else "none"
    rollout = await trial(proxy, command(name), tmp_path, check=("grep", "-qx", word, "out.txt"))
    log = (Path(rollout.logs or "") / "agent.log").read_text(errors="replace")[-3000:]
    assert rollout.status is RolloutStatus.DONE, f"{rollout.error}\n{log}"
    assert rollout.reward == 1.0, log
    found = await causes(proxy, rollout.trial_id)
    # Claude Code's search is a call of its own, with another system prompt.
    assert found == ["new_conversation"] * (name == "claude_code" and with_backend), found
    kinds = [e["kind"] async for e in proxy.control.events(rollout.trial_id)]
    assert ("refused" in kinds) == (name == "claude_code" and not with_backend)
    assert ("provider_tools" in kinds) == (name == "codex" or with_backend)
