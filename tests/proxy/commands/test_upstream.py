"""`agentic-proxy serve --upstream https://…`: agents on a hosted model, recorded as text."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from proxy.client import ProxyClient
from proxy.config import ProxyConfig
from proxy.errors import ConfigurationError
from proxy.extras.engines.hosted import TEXT_ONLY, key_variable, with_upstream
from proxy.records import Reward, SessionKind
from proxy.settings.state_folder import default_store
from tests.company_network import HOSTED, PrivateAuthority, company_proxy
from tests.proxy.hosted_model import HostedModel

SAID = "cafe\u0301 <|im_end|> and <tool_call>{}</tool_call> 🙂\r\n"
"""Decomposed accents, and marks that the recorder's own chat template uses."""
ARGUMENTS = json.dumps({"command": f"echo '{SAID}'"}, ensure_ascii=False)
CALLS = [{"id": "c1", "type": "function", "function": {"name": "shell", "arguments": ARGUMENTS}}]
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}}
ASK = """
import openai
messages = [{"role": "user", "content": "Hi."}]
answer = openai.OpenAI().chat.completions.create(model="m", messages=messages)
print(answer.choices[0].finish_reason)
"""
SHELL = {"name": "shell", "parameters": PARAMETERS}
HI = [{"role": "user", "content": "Hi."}]
ASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "chat/completions",
        {
            "messages": HI,
            "tools": [
                {"type": "function", "function": {"name": "shell", "parameters": PARAMETERS}}
            ],
        },
    ),
    "messages": (
        "messages",
        {
            "messages": HI,
            "max_tokens": 500,
            "tools": [{"name": "shell", "input_schema": PARAMETERS}],
        },
    ),
    "responses": (
        "responses",
        {
            "input": "Hi.",
            "tools": [{"type": "function", "name": "shell", "parameters": PARAMETERS}],
        },
    ),
}


@asynccontextmanager
async def serving(
    folder: Path, authority: PrivateAuthority, hosted: HostedModel
) -> AsyncIterator[str]:
    """The command, whose only way to the hosted model is a company's HTTP proxy; yields its URL."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", hosted.complete)
    async with authority.serving(app) as port, company_proxy(port) as company:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "proxy", "serve", "--port", "0", "--auto-create"),
            *("--upstream", f"https://{HOSTED}/v1", "--upstream-model", "big-one"),
            cwd=folder,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "OPENAI_API_KEY": "sk-mine",
                "SSL_CERT_FILE": str(authority.ca),
                "HTTPS_PROXY": company.url,
                "HTTP_PROXY": company.url,
            },
        )
        try:
            assert process.stdout is not None
            lines = [(await process.stdout.readline()).decode() for _ in range(3)]
            assert lines[2] == "this records text, not tokens: for evaluation and SFT, not for RL\n"
            yield lines[0].split()[3].rstrip(",")
        finally:
            process.terminate()
            await process.wait()
        assert company.heads


async def streamed(url: str, route: str, body: dict[str, Any]) -> str:
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{url}/v1/{route}", json={**body, "model": "any", "stream": True}) as response,
    ):
        assert response.status == 200, await response.text()
        return await response.text()


async def test_text_of_every_dialect_is_recorded_and_exported(tmp_path: Path) -> None:
    hosted = HostedModel()
    async with serving(tmp_path, PrivateAuthority(tmp_path), hosted) as url:
        for name, (route, body) in ASKS.items():
            hosted.says = [({"content": SAID, "tool_calls": CALLS}, "tool_calls")]
            events = await streamed(f"{url}/{name}", route, body)
            assert "shell" in events
            hosted.says = [({"content": None, "reasoning_content": "Hm."}, "stop")]
            await streamed(f"{url}/{name}-2", route, body)
        assert {*hosted.keys} == {"Bearer sk-mine"}
        assert {body["model"] for body in hosted.bodies} == {"big-one"}

        key = Path(f"{default_store()}.admin-key").read_text().strip()
        async with ProxyClient(url, key) as control:
            for name in ASKS:
                await control.add_reward(name, Reward("mine", 1.0))
            training = await control.create_session("rl", kind=SessionKind.TRAIN)
            assert (await control.show((await control.create_session()).trial_id))["kind"] == "eval"
        headers = {"Authorization": f"Bearer {training.api_key}"}
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.post(f"{training.base_url}/chat/completions", json={"messages": HI}) as refused,
        ):
            assert refused.status == 400
            assert "kind eval" in await refused.text()

        agent = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "proxy", "run", "--url", url, "--"),
            *(sys.executable, "-c", ASK),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
        )
        out, _ = await agent.communicate()
        assert (agent.returncode, out) == (0, b"stop\n")

    done = exported(tmp_path, "messages", "rows.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    answers = [row["messages"][-1] for row in rows]
    said = [answer for answer in answers if answer["tool_calls"]]
    assert len(said) == len(ASKS), done
    for answer in said:
        assert answer["content"] == SAID.rstrip()  # blanks before a call are not kept
        assert json.loads(answer["tool_calls"][0]["function"]["arguments"]) == json.loads(ARGUMENTS)
    assert [a["reasoning_content"] for a in answers].count("Hm.") == len(
        ASKS
    ) + 1  # and the agent of `run`

    assert "3 rows" in exported(tmp_path, "sft", "sft.jsonl", "--min-reward", "1")
    for form in ("trl", "verl", "prime-rl", "tinker", "skyrl"):
        refused_here = exported(tmp_path, form, f"{form}.jsonl")
        assert "sessions without log-probabilities (a text engine's)" in refused_here
        assert "0 rows" in refused_here


def exported(folder: Path, form: str, out: str, *more: str) -> str:
    """What the command says."""
    command = [sys.executable, "-m", "proxy", "export", "--format", form, "--kind", "eval"]
    done = subprocess.run(
        [*command, "--out", out, *more], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("url", "variable"),
    [
        ("https://api.anthropic.com/v1", "ANTHROPIC_API_KEY"),
        ("https://anthropic.com", "ANTHROPIC_API_KEY"),
        ("https://api.openai.com", "OPENAI_API_KEY"),
        ("https://anthropic.com.example.org", "OPENAI_API_KEY"),
        ("https://notanthropic.com", "OPENAI_API_KEY"),
    ],
)
def test_a_key_goes_to_its_own_provider(url: str, variable: str) -> None:
    assert key_variable(url) == variable
    keys = {"OPENAI_API_KEY": "o", "ANTHROPIC_API_KEY": "a"}
    (engine,) = with_upstream(ProxyConfig(), url, "m", keys).engines
    assert engine.api_key is not None
    assert engine.api_key.get_secret_value() == keys[variable]


def test_what_is_missing_is_named() -> None:
    url = "https://api.openai.com"
    with pytest.raises(ConfigurationError, match="--upstream-model: missing"):
        with_upstream(ProxyConfig(), url, None, {"OPENAI_API_KEY": "k"})
    with pytest.raises(ConfigurationError, match="OPENAI_API_KEY: not set"):
        with_upstream(ProxyConfig(), url, "m", {"ANTHROPIC_API_KEY": "k"})
    other = ProxyConfig.model_validate({"engines": [{"url": "http://127.0.0.1:1"}]})
    with pytest.raises(ConfigurationError, match="other engines"):
        with_upstream(other, url, "m", {"OPENAI_API_KEY": "k"})


def test_a_checkpoint_of_the_users_own_gives_its_tokens(tmp_path: Path) -> None:
    url, keys = "https://api.openai.com", {"OPENAI_API_KEY": "k"}
    assert with_upstream(ProxyConfig(model=tmp_path), url, "m", keys).model == tmp_path
    assert with_upstream(ProxyConfig(), url, "m", keys).model == TEXT_ONLY
