"""Wraps a Hugging Face causal model for the trainer: packed rows in, scores of tokens out.

Invariant: the scores are equal to those of the model's own forward pass over each sequence alone,
at the temperature of sampling. Models with features that packed attention or the fused output layer
cannot reproduce (sliding windows shorter than a sequence, recurrent layers, logit soft-capping) are
refused: see `architecture.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from trainer.errors import ConfigError
from trainer.packing import MicroBatch
from trainer.policy.architecture import (
    ATTENTION,
    check_model,
    check_scores,
    check_settings,
    without_noise,
)
from trainer.policy.attention import packed_attention
from trainer.policy.token_logprobs import token_logprobs

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class LoraSettings(BaseModel):
    """Section `model.lora`: train low-rank adapters (PEFT) instead of the weights."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(16, ge=1)
    """Rank of the adapters' two matrices."""
    alpha: float = Field(32.0, gt=0)
    """Scale of the adapters: their product is multiplied by `alpha / rank`."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Names of the layers that get an adapter; `all-linear`: all linear layers except the output
    layer."""


class ModelConfig(BaseModel):
    """Section `model`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Path
    """Folder of a Hugging Face checkpoint of a causal language model."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of activations and matrix products. The trained weights are always float32."""
    max_micro_batch_tokens: int = Field(8192, ge=1)
    """Maximum number of input tokens of a forward pass; a longer sequence has a pass of its own. On
    a CPU, only sequences that share a prefix form passes of more than 4096 tokens."""
    share_prefixes: bool = True
    """Compute each common prefix of a group's sequences once (tree attention)."""
    gradient_checkpointing: bool = False
    """Keep only the input of each layer for the backward pass, and recompute the rest, which saves
    memory."""
    lora: LoraSettings | None = None


class CausalScorer(nn.Module):
    """Computes the log-probabilities of given tokens, and the entropies of their distributions."""

    def __init__(self, model: Any, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.compute_dtype = compute_dtype

    def forward(
        self, micro: MicroBatch, ids: Tensor, temperature: float, *, entropy_grad: bool = False
    ) -> tuple[Tensor, Tensor]:
        """`(log-probabilities, entropies)`, both `[M]`, of the tokens `ids` `[M]` as the targets of
        the micro-batch."""
        hidden = last_hidden(self.model.get_decoder(), micro, self.compute_dtype)
        head: Tensor = self.model.get_output_embeddings().weight
        rows = hidden[micro.predictors].to(self.compute_dtype)
        return token_logprobs(rows, head, ids, temperature, entropy_grad=entropy_grad)


def last_hidden(decoder: nn.Module, micro: MicroBatch, compute_dtype: torch.dtype) -> Tensor:
    """The output of the decoder, `[T, D]`, for a packed row."""
    device = micro.ids.device.type
    with torch.autocast(device, compute_dtype, enabled=compute_dtype != torch.float32):
        output = decoder(
            input_ids=micro.ids[None],
            position_ids=micro.positions[None],
            layout=micro.layout,
            use_cache=False,
        )
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


def load_model(config: ModelConfig, *, trainable: bool = True) -> Any:
    """The checkpoint at `config.path` in float32, with packed attention and without dropout.

    Raises ConfigError if the folder holds no checkpoint of a causal model, or if the architecture's
    forward pass cannot be reproduced exactly.
    """
    settings = without_noise(load_settings(config.path))
    AttentionInterface.register(ATTENTION, packed_attention)
    model = AutoModelForCausalLM.from_pretrained(
        config.path,
        config=settings,
        dtype=torch.float32 if trainable else DTYPES[config.compute_dtype],
        attn_implementation=ATTENTION,
        local_files_only=True,
    )
    check_model(model, config.path)
    scorer = CausalScorer(model, DTYPES["float32"])
    check_scores(model, config.path, lambda micro, ids: scorer(micro, ids, 1.0)[0])
    if config.gradient_checkpointing and trainable:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if config.lora is not None and trainable:
        model = _add_lora(model, config.lora)
    return model.requires_grad_(False) if not trainable else model


def blocks(model: Any) -> list[nn.Module]:
    """The layers of the decoder, which are the units of sharding."""
    return list(model.get_decoder().layers)


def context_tokens(model: Any) -> int:
    """Maximum number of tokens of a sequence for which the model has positions."""
    return int(model.config.get_text_config().max_position_embeddings)


def vocabulary(model: Any) -> int:
    """Number of tokens that the model has an embedding for."""
    return int(model.config.get_text_config().vocab_size)


def named_hf_parameters(model: Any) -> Iterator[tuple[str, Tensor]]:
    """`(name, tensor)` as in a checkpoint: with merged adapters, gathered shards, and tied weights
    only once.

    Under FSDP every rank must iterate, because each tensor is gathered from all ranks.
    """
    adapted = {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight")
    }
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        tensor = _whole(parameter)
        owner = name.removesuffix(".base_layer.weight")
        if owner in adapted:
            tensor = tensor + _whole(adapted[owner].get_delta_weight("default"))
        yield name.removeprefix("base_model.model.").replace(".base_layer.", "."), tensor


def load_settings(path: Path, key: str = "model.path") -> Any:
    """The checkpoint's `config.json`. Raises ConfigError, which names `key`, like `load_model`."""
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"{key}: {path} holds no config.json; give the folder of a Hugging Face checkpoint"
        )
    try:
        settings = AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{key}: {path}: {_one_line(error)}") from error
    check_settings(settings, path, key)
    _check_tokenizer(path, key, settings.get_text_config().vocab_size)
    return settings


def _whole(tensor: Tensor) -> Tensor:
    """The whole tensor, gathered from all ranks if it is sharded."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _check_tokenizer(path: Path, key: str, vocabulary: int) -> None:
    """Checks that the tokenizer has no more tokens than the model has embeddings."""
    file = path / "tokenizer.json"
    if file.is_file():
        tokens = Tokenizer.from_file(str(file)).get_vocab_size()
        if tokens > vocabulary:
            raise ConfigError(
                f"{key}: {path}: its tokenizer has {tokens} tokens, but its model only"
                f" {vocabulary}; use a model and a tokenizer of the same checkpoint"
            )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _add_lora(model: Any, lora: LoraSettings) -> Any:
    from peft import LoraConfig, get_peft_model

    _check_targets(model, lora)
    targets = lora.target_modules
    return get_peft_model(
        model,
        LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=0.0,
            target_modules=targets if isinstance(targets, str) else list(targets),
            task_type="CAUSAL_LM",
        ),
    )


def _check_targets(model: Any, lora: LoraSettings) -> None:
    """Checks that there is no adapter on the output layer or on embeddings that
    share its weights."""
    targets, head = lora.target_modules, model.get_output_embeddings()
    if targets == "all-linear":  # leaves out the output layer
        return
    for name, module in model.named_modules():
        if getattr(module, "weight", None) is not head.weight:
            continue
        if isinstance(targets, str):
            adapted = re.fullmatch(targets, name) is not None
        else:
            adapted = any(name == each or name.endswith(f".{each}") for each in targets)
        if adapted:
            raise ConfigError(
                f"model.lora.target_modules={targets!r}: an adapter on the output layer ({name}) is"
                " not computed in training; remove this layer"
            )
