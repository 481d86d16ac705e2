"""Starts vLLM's own decisions for a small model in the posing environment."""

from __future__ import annotations

import asyncio
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM

from proxy.engines.vllm_server import VllmConfig, VllmServer
from tests.trainer.policy.architectures import ARCHITECTURES, Architecture
from trainer.policy.shrink import shrunk

PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "glm4_moe": {"head_dim": 128},
    "minimax_m2": {"rotary_dim": 64, "scoring_func": "sigmoid", "use_routing_bias": True},
}
"""What the published `config.json` has, vLLM reads, and transformers has no default for."""


def of_mimo(small: Any) -> dict[str, Any]:
    """What vLLM reads in the published file of MiMo-V2-Flash. transformers has other settings for
    the same, as far as they can differ from layer to layer."""
    heads = ("num_attention_heads", "head_dim", "v_head_dim")
    return {
        "hybrid_layer_pattern": [int("sliding" in kind) for kind in small.layer_types],
        "moe_layer_freq": [int(kind == "sparse") for kind in small.mlp_layer_types],
        "add_swa_attention_sink_bias": True,
        "layernorm_epsilon": small.rms_norm_eps,
        "sliding_window_size": small.sliding_window,
        "swa_num_key_value_heads": 2 * small.num_key_value_heads,  # as transformers has it
        **{f"swa_{name}": getattr(small, name) for name in heads},
    }


TRAINED = tuple(each for each in ARCHITECTURES if not each.refused)


def small_settings(architecture: Architecture) -> Any:
    """A small copy of the published configuration."""
    published = architecture.settings()
    for name, value in PUBLISHED.get(architecture.kind, {}).items():
        setattr(published.get_text_config(), name, value)
    settings = shrunk(published)
    if architecture.kind == "mimo_v2_flash":
        settings.update(of_mimo(settings))
    return settings


def written(architecture: Architecture, folder: Path, seed: int = 0) -> Any:
    """A small random checkpoint of the class, and its model in float32. Every weight and buffer
    depends on the seed."""
    settings = small_settings(architecture)
    settings.dtype = "bfloat16"
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(settings).to(torch.bfloat16)
    with torch.no_grad():
        for tensor in (*model.parameters(), *_saved_buffers(model)):
            if tensor.is_floating_point():
                tensor.add_(0.02 * torch.randn_like(tensor))
    model.save_pretrained(folder)
    return model


def _saved_buffers(model: Any) -> list[torch.Tensor]:
    saved = model.state_dict()
    return [buffer for name, buffer in model.named_buffers() if name in saved]


class _NotStarted(Exception):
    """In place of a server's process."""


def started(model: Path, dtype: str, **settings: Any) -> tuple[list[str], dict[str, str]]:
    """The command line and the environment of the process that a run starts as a server. They are
    taken where the process would begin, not where they are decided."""
    given = {"max_context_tokens": 256, "max_sequences": 4, "weight_transfer": "shm", **settings}
    given["args"] = (*given.get("args", ()), "--skip-tokenizer-init")
    config = VllmConfig.model_validate(given)
    taken: list[tuple[list[str], dict[str, str]]] = []

    async def begin(*words: str, env: dict[str, str], **_more: Any) -> None:
        taken.append(([*words], dict(env)))
        raise _NotStarted

    async def start() -> None:
        server = VllmServer(config, model, log=model / "log", dtype=dtype)
        try:
            await server.start()
        except _NotStarted:
            await server.stop()

    with patch.object(asyncio, "create_subprocess_exec", begin):
        asyncio.run(start())
    return taken[0]


def arguments(model: Path, dtype: str, **settings: Any) -> list[str]:
    """What a run starts a server with, without the launcher and the server's address."""
    command, _ = started(model, dtype, **settings)
    return command[command.index("--model") :]


def configured(words: list[str]) -> Any:
    """vLLM's own configuration of an API server that is started with these arguments."""
    parser: Any = import_module("vllm.utils.argparse_utils").FlexibleArgumentParser()
    parser = import_module("vllm.entrypoints.launchers.cli_args").make_arg_parser(parser)
    made = import_module("vllm.engine.arg_utils").AsyncEngineArgs.from_cli_args(
        parser.parse_args(words)
    )
    usage = import_module("vllm.usage.usage_lib").UsageContext.OPENAI_API_SERVER
    return made.create_engine_config(usage_context=usage)
