"""A proxy whose process may open few files answers 429 and `/health`, instead of nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

CALLS = 150
LIMITED = """
import asyncio, json, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 400))

import aiohttp
from pathlib import Path
from proxy.config import load_config
from proxy.testing.scripted_engine import ScriptedEngine
from proxy.process import listen

async def main(checkpoint, folder, calls):
    async with ScriptedEngine(lambda _: []) as engine:
        engine.token_delay_s = 0.02
        config = load_config(
            None, model=Path(checkpoint), engines=[{"url": engine.url}], admin_key="k" * 20,
            store=f"sqlite:///{folder}/proxy.db", port=0,
            limits={"in_flight_calls": 4096},
            sessions={"max_concurrent_calls": 1000, "auto_create": True},
        )
        async with listen(config) as (_, url, _runner):
            soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            print(json.dumps({"url": url, "soft": soft}), flush=True)
            await asyncio.to_thread(sys.stdin.readline)

asyncio.run(main(*sys.argv[1:]))
"""
CLIENT = """
import asyncio, json, sys
import aiohttp

async def main(url, calls):
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 64}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        async def call():
            async with http.post(f"{url}/t/v1/chat/completions", json=body) as response:
                await response.read()
                return response.status
        running = [asyncio.create_task(call()) for _ in range(int(calls))]
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        async with http.get(f"{url}/health") as response:
            health = response.status
        print(json.dumps({"health": health, "statuses": await asyncio.gather(*running)}))

asyncio.run(main(*sys.argv[1:]))
"""


def test_calls_beyond_the_files_of_the_process_get_429_and_health_answers(
    checkpoint: Path, tmp_path: Path
) -> None:
    argv = [sys.executable, "-c", LIMITED, str(checkpoint), str(tmp_path), str(CALLS)]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        assert server.stderr is not None
        try:
            started = json.loads(server.stdout.readline())
            assert started["soft"] == 400
            client = [sys.executable, "-c", CLIENT, started["url"], str(CALLS)]
            done = subprocess.run(client, capture_output=True, text=True, check=True, timeout=120)
        finally:
            server.stdin.close()
        warning = server.stderr.read()
    got = json.loads(done.stdout)
    assert got["health"] == 200
    assert set(got["statuses"]) <= {200, 429}
    assert 0 < got["statuses"].count(200) <= CALLS
    assert "accepts 72 calls in flight and not limits.in_flight_calls=4096" in warning
    assert "Too many open files" not in warning
