"""Loads a Hugging Face causal model for the trainer.

Invariant: the trainer computes a loaded model exactly as the model's own code does. If the model's
configuration excludes this, `architecture.py` refuses the model; if the results differ, `proof.py`
does.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
from torch import nn

from proxy.settings.late_section import load_extra
from trainer.errors import ConfigError
from trainer.policy.adapter import EarlyAdapters, check_adapter
from trainer.policy.architecture import check_model, without_noise
from trainer.policy.cpu_linear import use_wide_products
from trainer.policy.image_reader import add_reader, reader_of
from trainer.policy.loading import Place, load_weights
from trainer.policy.model_config import (
    DTYPES,
    LoraSettings,
    ModelConfig,
    context_limit,
    load_settings,
    recompute,
)
from trainer.policy.proof import prove
from trainer.policy.scorer import use_packed_rows
from trainer.policy.towers import check_reads


def load_model(
    config: ModelConfig,
    *,
    trainable: bool = True,
    place: Place | None = None,
    without_head: bool = False,
) -> Any:
    """The checkpoint at `config.path` in `config.weights_dtype` (or the compute type, if it is not
    trained), with packed attention and without dropout.

    `place` shards each layer, with its adapters, as soon as it is read. `without_head`: the
    checkpoint may have no output layer.

    Raises ConfigError if the folder holds no checkpoint of a causal model, if weights are missing,
    or if the architecture's forward pass cannot be reproduced exactly.
    """
    settings = without_noise(load_settings(config.path))
    if config.vision != "text":
        check_reads(settings, config.path)
    problem = prove(settings, config.path)
    replays = config.router_replay == "replay" and trainable
    if replays:
        load_extra("trainer.extras.experts.router_replay:check_replay")(settings, config.path)
    if config.router_aux_loss and trainable:
        load_extra("trainer.extras.experts.router_balance:check_balance")(settings, config.path)
    lora = config.lora if trainable else None
    adapters = None if place is None or lora is None else EarlyAdapters(partial(_add_lora, lora))

    def placed(layer: nn.Module) -> None:
        assert place is not None
        if adapters is None:
            layer.requires_grad_(trainable)
        else:
            adapters.put_on(layer)
        place(layer)

    model = load_weights(
        config.path,
        settings,
        DTYPES[config.weights_dtype if trainable else config.compute_dtype],
        place=None if place is None else placed,
        prepare=None if adapters is None else adapters.prepare,
        without_head=without_head,
        with_tower=config.vision != "text",
    )
    if place is not None and trainable and lora is None:
        _check_one_type(model, config)
    if config.vision != "text":
        _read_images(model, config, trainable=trainable)
    check_model(model, config.path)
    use_packed_rows(model if config.vision == "text" else model.get_decoder())
    use_wide_products(model)
    if replays:
        load_extra("trainer.extras.experts.router_replay:replay_routing")(model)
    if config.checkpoints and trainable:
        recompute(model, config)
    if lora is not None:
        model = _add_lora(lora, model) if adapters is None else adapters.complete(model)
        check_adapter(model, merged=lora.update == "merged")
    reader = reader_of(model)
    if reader is not None and reader.whole_images:
        problem = problem or "the tokens of an image see each other"
    model.pieces_problem = problem
    if not trainable:
        model.requires_grad_(False)
    return model


def _read_images(model: Any, config: ModelConfig, *, trainable: bool) -> None:
    """Gives the model its reader; a frozen tower has the compute type, as the engine's."""
    dtype = DTYPES[config.compute_dtype]
    trained = trainable and config.vision == "trained"
    add_reader(model, config.path, dtype, trained=trained)
    if not trained:
        model.image_reader.tower.to(dtype).requires_grad_(False)


def pieces_problem(model: Any) -> str:
    """Why trees of a loaded model are not computed in pieces; empty if they are."""
    return str(model.pieces_problem)


def blocks(model: Any) -> list[nn.Module]:
    """The layers of the decoder, which are the units of sharding."""
    return list(model.get_decoder().layers)


def context_tokens(model: Any) -> int:
    """Maximum number of tokens of a sequence for which the model has positions."""
    return context_limit(model.config)


def vocabulary(model: Any) -> int:
    """Number of tokens that the model has an embedding for."""
    return int(model.config.get_text_config().vocab_size)


def _check_one_type(model: Any, config: ModelConfig) -> None:
    """Checks that ranks can shard the model: FSDP2 gathers weights of one type."""
    others = {name: each.dtype for name, each in model.named_parameters()}
    wanted = max(others.values(), key=list(others.values()).count)
    odd = next((name for name, dtype in others.items() if dtype != wanted), None)
    if odd is not None:
        raise ConfigError(
            f"model.weights_dtype={config.weights_dtype}: {config.path} keeps {odd} in "
            f"{str(others[odd]).removeprefix('torch.')}, and ranks shard weights of one type; use "
            "weights_dtype=float32, or one rank"
        )


def _add_lora(lora: LoraSettings, model: Any) -> Any:
    """The model with adapters, which depend on torch's seed, but not on what was drawn before."""
    from peft import LoraConfig, get_peft_model

    _check_targets(model, lora)
    targets = lora.target_modules
    config = LoraConfig(
        r=lora.rank,
        exclude_modules=_tower_modules(model),
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch.initial_seed())
        return get_peft_model(model, config)


def _tower_modules(model: Any) -> str | None:
    """A pattern of the names of the tower's modules, which get no adapter."""
    reader = reader_of(model)
    if reader is None:
        return None
    parts = {reader.tower, *reader.tower.children()}
    names = [re.escape(name) for name, module in model.named_modules() if module in parts]
    return rf"({'|'.join(names)})\..*"


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
