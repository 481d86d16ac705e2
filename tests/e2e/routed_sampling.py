"""Answers of a running vLLM with the experts that its routers chose, and the trainer's choice."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from proxy.engines.protocol import Chunk, Sampling
from proxy.engines.vllm import VllmEngine
from proxy.generation import Generation
from proxy.records import Turn, TurnStatus, VersionSpan
from proxy.routing import Router
from trainer.packing import Layout
from trainer.policy.policy import Policy

VOCABULARY = 128


def sample_turns(url: str, *, prompts: int, tokens: int) -> list[Turn]:
    """Answers of up to `tokens` tokens to random prompts, which run together."""
    return asyncio.run(_sample(url, prompts, tokens))


async def _sample(url: str, prompts: int, tokens: int) -> list[Turn]:
    router = Router([VllmEngine(url)], vocab_size=VOCABULARY)
    await router.start()
    rng = np.random.default_rng(0)
    try:
        given = [rng.integers(1, VOCABULARY, rng.integers(5, 40)) for _ in range(prompts)]
        return await asyncio.gather(*(_turn(router, ids, tokens) for ids in given))
    finally:
        await router.close()


async def _turn(router: Router, prompt: Any, tokens: int) -> Turn:
    ids = prompt.astype(np.int32)
    sampling = Sampling(max_tokens=tokens, experts_from=0, trained=True)
    call = Generation(router, ids, sampling, request_id=f"{id(ids)}#0", session_id="s")
    sampled: list[int] = []
    logprobs: list[float] = []
    async with aclosing(call.stream()) as pieces:
        async for piece in pieces:
            assert isinstance(piece, Chunk)
            sampled += piece.ids
            logprobs += piece.logprobs
    return Turn(
        session_id="s",
        index=0,
        parent=None,
        shared_tokens=0,
        fork_cause=None,
        prompt_ids=ids,
        request_key=b"",
        sampling={},
        sampled_ids=np.array(sampled, np.int32),
        logprobs=np.array(logprobs, np.float32),
        versions=(VersionSpan(0, 0, len(sampled)),),
        status=TurnStatus.DONE,
        routed_experts=call.routed_experts,
    )


@torch.no_grad()
def experts_of(policy: Policy, ids: Tensor) -> Tensor:
    """`[T, L, K]`, the experts that the trainer's model chooses, the best first."""
    chosen: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
        chosen.append(output[2])

    gates = [layer.mlp.gate for layer in policy.model.get_decoder().layers]
    hooks = [gate.register_forward_hook(keep) for gate in gates]
    layout = Layout(torch.full((ids.shape[1],), ids.shape[1]), ids.shape[1])
    policy.model.get_decoder()(input_ids=ids, layout=layout, use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, 1)
