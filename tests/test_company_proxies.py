"""HTTP_PROXY and the like: what belongs to a run is reached directly, by all of our clients and
by every child process; the rest goes through the company's proxy.

The rules themselves are in `tests/proxy/machine/test_direct_hosts.py`.
"""

from __future__ import annotations

import ast
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import SecretStr

from agent_loop.errors import AgentLoopError, LaunchError, RewardError
from agent_loop.extras.harbor.servers import HarborServers
from agent_loop.extras.judge.models import JudgeAccess
from agent_loop.extras.judge.reward import Judge, JudgeConfig
from agent_loop.extras.kubernetes.objects import JobSettings, _pod
from agent_loop.extras.swarm import AsyncSwarmClient, SwarmError
from agent_loop.extras.swarm.joint import outcome
from agent_loop.extras.swarm.producer import SwarmProducer
from agent_loop.extras.swarm.wire import Decider
from agent_loop.launchers.agent_process import agent_environment
from agent_loop.launchers.http import HttpConfig
from agent_loop.processes.environment import inherited_environment
from agent_loop.records import Trial
from harbor_sdk import AgentRunError
from harbor_sdk.agents import connect
from harbor_sdk.models import AgentSpec
from proxy.client import ProxyClient
from proxy.commands.doctor import _engine
from proxy.engines.vllm_server import VllmConfig, server_environment
from proxy.extras.relay.protocol import Fingerprint
from proxy.extras.relay.worker import RelayWorker
from proxy.extras.relay.worker_config import WorkerConfig
from proxy.machine.secrecy import inherited
from proxy.serving.images import _fetched
from tests.agent_loop.conftest import make_trial as make_trial
from tests.company_network import DEAD, HOSTED, PROXY_NAMES, company_proxy
from trainer.cluster.proxy_server import _environment

ROOT = Path(__file__).parents[1]
NOBODY = "127.0.0.1:9"
"""Nothing listens there."""


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PROXY_NAMES, "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


def _of_a_pod(trial: Trial) -> Mapping[str, str]:
    settings = JobSettings(image="agent:1", env={"HTTP_PROXY": DEAD})
    (container,) = _pod(settings, trial, "job", 5)["containers"]
    return {each["name"]: each.get("value", "") for each in container["env"]}


def _of_harbor(trial: Trial) -> Mapping[str, str]:
    agent = AgentSpec(name="codex", env={"HTTPS_PROXY": DEAD})
    return connect(agent, trial.base_url, trial.api_key).env


CHILDREN: dict[str, Callable[[Trial], Mapping[str, str]]] = {
    "an agent": lambda trial: agent_environment(trial, {}),
    "a grader or verifier": lambda _: inherited_environment(),
    "an engine": lambda _: server_environment(VllmConfig()),
    "the proxy of a run": lambda _: _environment(()),
    "our other programs": lambda _: inherited(),
    "an agent in a pod": _of_a_pod,
    "an agent of Harbor": _of_harbor,
}


@pytest.mark.parametrize("name", CHILDREN)
def test_child_process_reaches_the_run_directly(
    name: str, make_trial: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in PROXY_NAMES:
        monkeypatch.setenv(variable, DEAD)
    monkeypatch.setenv("no_proxy", ".corp")
    environment = CHILDREN[name](make_trial())
    for spelling in ("NO_PROXY", "no_proxy"):
        assert {"localhost", "127.0.0.1", "::1"} <= set(environment[spelling].split(","))
    own = name in ("an agent in a pod", "an agent of Harbor")  # what their settings say
    assert own or environment["NO_PROXY"].startswith(".corp,")


async def _as_admin(url: str) -> None:
    async with ProxyClient(url, "key") as client:
        assert not await client.ready()


async def _of_a_swarm(url: str) -> None:
    async with AsyncSwarmClient(url, "token", patience_s=0.0) as client:
        with suppress(SwarmError):
            await client.status()


async def _to_a_swarm(url: str) -> None:
    hello: Any = SimpleNamespace(model_dump=lambda **_: {})
    producer = SwarmProducer(url, "key", hello)
    with suppress(AgentLoopError):
        await producer.next_batch(0)
    assert producer._http is not None
    await producer._http.close()


async def _decided(url: str) -> None:
    assert await outcome(Decider(url=url, episode_id="e", key="k")) is None


async def _harbor(url: str) -> None:
    servers = HarborServers([url], None, wait_s=1.0)
    async with servers.place() as server:
        with suppress(AgentRunError):
            await server.client.get("run")
        await server.client.close()


async def _judged(url: str) -> None:
    judge = Judge(JudgeConfig(base_url=f"{url}/v1", model="m", attempts=1))
    with suppress(RewardError):
        await judge._ask(JudgeAccess(f"{url}/v1", "m", {}), "How good?")
    await judge.close()


async def _service(url: str) -> None:
    launcher = HttpConfig(url=url).build()
    with suppress(LaunchError):
        await launcher._call("POST", url, {})
    await launcher.close()


async def _relay(url: str) -> None:
    config = WorkerConfig(
        proxy=url.replace("http", "ws", 1),
        engine="http://127.0.0.1:1",
        model=Path("m"),
        token=SecretStr("t"),
    )
    engine: Any = SimpleNamespace()
    assert await RelayWorker(engine, Fingerprint("t", "a"), config)._connection()


async def _doctor(url: str) -> None:
    assert (await _engine(url)).grade == "fault"


async def _image(url: str) -> None:
    assert await _fetched(f"{url}/a.png", "a.png") is None


CLIENTS: dict[str, Callable[[str], Awaitable[None]]] = {
    "the control plane's client": _as_admin,
    "a client of a swarm": _of_a_swarm,
    "the trainer of a swarm": _to_a_swarm,
    "a prepared episode": _decided,
    "a harbor-server's client": _harbor,
    "a judge": _judged,
    "a service of agents": _service,
    "a relay worker": _relay,
    "doctor": _doctor,
    "an image by URL": _image,
}


@pytest.mark.parametrize("name", CLIENTS)
async def test_client_of_ours_reaches_foreign_hosts_through_the_proxy_and_the_run_without(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with company_proxy(9) as proxy:
        proxy.status = b"403 Forbidden"
        for variable in PROXY_NAMES:
            monkeypatch.setenv(variable, proxy.url)
        await CLIENTS[name](f"https://{HOSTED}")
        assert proxy.heads
        assert all(head.startswith(f"CONNECT {HOSTED}:443 ".encode()) for head in proxy.heads)
        proxy.heads.clear()
        await CLIENTS[name](f"http://{NOBODY}")
        assert not proxy.heads


OWN_PROCESSES = {
    "proxy/commands/removal.py": "a Unix socket",
    "proxy/engines/vllm_server.py": "the server that this process has started",
    "proxy/extras/several_processes/other_proxies.py": "the addresses of our other proxies",
    "proxy/extras/several_processes/siblings.py": "Unix sockets",
    "proxy/serving/forwarding.py": "Unix sockets",
    "trainer/cluster/local_engine.py": "the server that this process has started",
}
"""Where a session reaches nothing but processes of the run itself."""


def _sessions(source: str) -> Iterator[bool]:
    """For each HTTP session that is opened: whether it is said which proxy it uses."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("ClientSession"):
            yield any(keyword.arg == "proxy" for keyword in node.keywords)


def test_no_other_session_forgets_the_proxy() -> None:
    files = [
        file
        for package in ("proxy", "agent_loop", "trainer", "harbor_sdk")
        for file in (ROOT / package).rglob("*.py")
    ]
    found = {str(file.relative_to(ROOT)): [*_sessions(file.read_text("utf-8"))] for file in files}
    assert sum(map(len, found.values())) > len(CLIENTS)
    without = {name for name, said in found.items() if not all(said)}
    assert without == OWN_PROCESSES.keys(), "give proxy=proxy_for(url)"
