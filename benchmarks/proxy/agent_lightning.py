"""Starts Agent Lightning's LLM proxy and prints the URL of a rollout's chat completions.

    python agent_lightning.py UPSTREAM PORT

It runs in Agent Lightning's own virtual environment, so it imports nothing of this project.
"""

import asyncio
import contextlib
import sys
from typing import TextIO

from agentlightning import InMemoryLightningStore, LLMProxy
from agentlightning.utils.server_launcher import PythonServerLauncherArgs

HOST = "127.0.0.1"


async def main(upstream: str, port: int, to: TextIO) -> None:
    store = InMemoryLightningStore(thread_safe=True)
    rollout = await store.start_rollout({})
    engine = {"model": "hosted_vllm/fake", "api_base": f"{upstream}/v1", "api_key": "none"}
    proxy = LLMProxy(
        model_list=[{"model_name": "fake", "litellm_params": engine}],
        store=store,
        callbacks=["return_token_ids", "opentelemetry", "logprobs"],
        launcher_args=PythonServerLauncherArgs(
            host=HOST,
            access_host=HOST,
            port=port,
            launch_mode="thread",
            startup_timeout=600.0,
        ),
    )
    await proxy.start()
    path = f"rollout/{rollout.rollout_id}/attempt/{rollout.attempt.attempt_id}"
    print(f"http://{HOST}:{port}/{path}/v1/chat/completions", file=to, flush=True)
    await asyncio.Event().wait()


printed = sys.stdout
with contextlib.redirect_stdout(sys.stderr):  # LiteLLM's banner and the log of its server
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), printed))
