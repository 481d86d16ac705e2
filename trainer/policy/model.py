"""A Hugging Face causal model as the trainer computes with it: packed rows in, token scores out.

Invariant: the scores are those of the model's own forward pass over each sequence alone, at the
temperature it was sampled with. What packed attention or the fused head cannot reproduce (sliding
windows shorter than a sequence, recurrent layers, logit soft-capping) is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from trainer.policy.attention import ATTENTION, packed_attention
from trainer.policy.token_logprobs import token_logprobs

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class LoraSettings(BaseModel):
    """Section `model.lora`: train low-rank adapters (PEFT) instead of the weights."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(16, ge=1)
    alpha: float = Field(32.0, gt=0)
    target_modules: str | tuple[str, ...] = "all-linear"
    """Names of the layers that get an adapter; `all-linear` leaves out the output layer."""


class ModelConfig(BaseModel):
    """Section `model`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Path
    """Folder of a Hugging Face checkpoint of a causal language model."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of activations and matrix products; the weights that train are float32 always."""
    max_micro_batch_tokens: int = Field(8192, ge=1)
    """Input tokens of a forward pass; a longer sequence has a pass for itself. On a CPU only what
    shares a prefix makes passes of more than 4096."""
    share_prefixes: bool = True
    """Compute the tokens that a group's sequences start with in common once (tree attention)."""
    gradient_checkpointing: bool = False
    """Keep only each layer's input for the backward pass and compute the rest again."""
    lora: LoraSettings | None = None


class CausalScorer(nn.Module):
    """The model and what is asked of it: log-probabilities of given tokens, and entropies."""

    def __init__(self, model: Any, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.compute_dtype = compute_dtype

    def forward(
        self, micro: MicroBatch, ids: Tensor, temperature: float, *, entropy_grad: bool = False
    ) -> tuple[Tensor, Tensor]:
        """`(log-probabilities, entropies)` `[M]` of the tokens `ids` `[M]` at micro's targets."""
        hidden = last_hidden(self.model.get_decoder(), micro, self.compute_dtype)
        head: Tensor = self.model.get_output_embeddings().weight
        rows = hidden[micro.predictors].to(self.compute_dtype)
        return token_logprobs(rows, head, ids, temperature, entropy_grad=entropy_grad)


def last_hidden(decoder: nn.Module, micro: MicroBatch, compute_dtype: torch.dtype) -> Tensor:
    """The decoder's output `[T, D]` for a packed row."""
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
    """The checkpoint at `config.path` in float32, with packed attention, dropout off.

    Raises ConfigError when the folder holds no checkpoint of a causal model, or one of an
    architecture whose forward pass could not be reproduced exactly.
    """
    settings = load_settings(config.path)
    AttentionInterface.register(ATTENTION, packed_attention)
    model = AutoModelForCausalLM.from_pretrained(
        config.path,
        config=settings,
        dtype=torch.float32 if trainable else DTYPES[config.compute_dtype],
        attn_implementation=ATTENTION,
        local_files_only=True,
    )
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if config.gradient_checkpointing and trainable:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if config.lora is not None and trainable:
        model = _add_lora(model, config.lora)
    return model.requires_grad_(False) if not trainable else model


def blocks(model: Any) -> list[nn.Module]:
    """The decoder's layers: the units of sharding."""
    return list(model.get_decoder().layers)


def context_tokens(model: Any) -> int:
    """The longest sequence that the model has positions for."""
    return int(model.config.get_text_config().max_position_embeddings)


def vocabulary(model: Any) -> int:
    """How many tokens the model has an embedding for."""
    return int(model.config.get_text_config().vocab_size)


def named_hf_parameters(model: Any) -> Iterator[tuple[str, Tensor]]:
    """`(name, tensor)` as in a checkpoint: adapters merged in, shards gathered, tied weights once.

    Under FSDP every rank must iterate, as each tensor is gathered from all.
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
    """The checkpoint's `config.json`. ConfigError, naming `key`, as `load_model`."""
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"{key}: {path} holds no config.json; give the folder of a Hugging Face checkpoint"
        )
    try:
        settings = AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{key}: {path}: {_one_line(error)}") from error
    text = settings.get_text_config()
    _check_tokenizer(path, key, text.vocab_size)
    kinds: Sequence[str] = getattr(text, "layer_types", None) or ()
    strange = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if strange:
        raise ConfigError(
            f"{key}: {path}: layers of type {strange} cannot be packed exactly; "
            "use a model whose layers are attention"
        )
    scaled = ("final_logit_softcapping", "attn_logit_softcapping", "logit_scale", "logits_scaling")
    for name in scaled:
        if getattr(text, name, None) not in (None, 1, 1.0):
            raise ConfigError(f"{key}: {path}: {name} is not supported; use another model")
    return settings


def _whole(tensor: Tensor) -> Tensor:
    """Gathered from all ranks, if it is sharded."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _check_tokenizer(path: Path, key: str, vocabulary: int) -> None:
    """A model may have more embeddings than its tokenizer has tokens, never fewer."""
    file = path / "tokenizer.json"
    if file.is_file():
        tokens = Tokenizer.from_file(str(file)).get_vocab_size()
        if tokens > vocabulary:
            raise ConfigError(
                f"{key}: {path}: its tokenizer has {tokens} tokens, its model only"
                f" {vocabulary}; the two are not of one checkpoint"
            )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _add_lora(model: Any, lora: LoraSettings) -> Any:
    from peft import LoraConfig, get_peft_model

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
