"""The section `model` of the configuration, and the settings of the checkpoint that it names.

Nothing here loads weights; `model.py` does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import ConfigDict, Field, model_validator
from tokenizers import Tokenizer
from transformers import AutoConfig

from proxy.records import POLICY_NAME
from proxy.settings.section import Common, Settings
from trainer.errors import ConfigError
from trainer.policy.architecture import check_settings
from trainer.policy.checkpoint_type import ComputeDtype, checkpoint_type, other_type

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
QUANTISED_BESIDE = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Files in which AutoGPTQ, AutoAWQ and ModelOpt say how they quantised a checkpoint whose
`config.json` may not."""
MICRO_BATCH_TOKENS = 8192
"""Of `max_micro_batch_tokens`, and what it is where it is None and nothing decides it."""


class LoraSettings(Settings):
    """Section `model.lora`: train low-rank adapters (PEFT) instead of the weights."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    rank: Common[int] = Field(16, ge=1)
    """Rank of the adapters' two matrices."""
    alpha: float = Field(32.0, gt=0, le=1e6)
    """Scale of the adapters: their product is multiplied by `alpha / rank`."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Names of the layers that get an adapter; `all-linear`: all linear layers except the output
    layer."""
    update: Common[Literal["adapter", "merged"]] = "merged"
    """How engines get an update. `merged`: all weights are sent, with the adapter merged into them.
    `adapter`: only the adapter is sent, and a vLLM server serves it next to the weights of
    `model.path`, without a pause."""
    policy: str = Field("policy", pattern=f"^{POLICY_NAME.pattern}$")
    """Name of the policy that is trained, with `adapter`. Runs that share a proxy or an engine need
    different names."""


def _type_at_path(section: Mapping[str, Any]) -> ComputeDtype:
    """The default of `compute_dtype`."""
    if section.get("weights_dtype") == "bfloat16":
        return "bfloat16"
    path = section.get("path")  # missing if it is wrong
    return checkpoint_type(path) if isinstance(path, Path) else "float32"


class ModelConfig(Settings):
    """Section `model`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    path: Common[Path]
    """Folder of a Hugging Face checkpoint of a causal language model, or `hf://owner/name` on the
    hub, also with `@revision`, which is downloaded."""
    weights_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the trained weights and of their gradients; the optimizer's moments are float32.
    `bfloat16` needs 12 bytes per weight instead of 16, and `compute_dtype: bfloat16`; each step
    rounds at random, so that small steps are not lost (docs/scale.md)."""
    compute_dtype: Common[ComputeDtype] = Field(default_factory=_type_at_path)
    """Type of activations and matrix products. By default that of the checkpoint: float32, or
    bfloat16 for one of 16 bits or fewer."""
    max_micro_batch_tokens: Common[int | None] = Field(MICRO_BATCH_TOKENS, ge=1)
    """Maximum number of input tokens of a forward pass; a longer sequence that shares none has a
    pass of its own. On a CPU, only sequences that share a prefix form passes of more than 4096
    tokens. None: 8192, or on a GPU that no engine uses meanwhile, what the plan has room for, up to
    65536."""
    share_prefixes: bool = True
    """Compute each common prefix of a mini-batch's sequences once (tree attention), in several
    passes if it does not fit in one micro-batch."""
    prefix_gib: float | None = Field(None, ge=0)
    """Most memory of a GPU for the keys, values and states of prefixes that several passes share,
    and for their gradients, in GiB; what is more lies in the machine's memory. None: all of it,
    or what the plan has room for."""
    gradient_checkpointing: bool | Annotated[int, Field(ge=1)] | None = None
    """Keep only the input of each layer for the backward pass, and recompute the rest, which saves
    memory; a number: in that many layers. None: in as many as must so that a rank fits on its
    GPU, by the plan that a run on one machine prints."""
    compile_layers: bool = False
    """Compile the layers and the output layer, on a GPU in bfloat16, so that less is kept for the
    backward pass. float32 is always computed by the model's own code. Off until a card has shown
    that it is right and faster: `python -m benchmarks.gpu --only card` does."""
    activation_offload: bool = False
    """Keep the inputs of layers in the machine's memory between forward and backward pass. Turns
    `gradient_checkpointing` on."""
    router_replay: Literal["off", "replay"] = "off"
    """Mixture of experts: `replay` computes each token with the experts that the engine chose for
    it when it sampled or read it, weighted by its own router (R3, arXiv 2510.11370), which
    removes the differences of the two routers. The engines and sessions of the run then record
    them (docs/models.md)."""
    router_aux_loss: float = Field(0.0, ge=0, le=1e3)
    """Mixture of experts: factor of the auxiliary loss that balances the load of the experts
    (`router_aux_loss_coef` of `config.json`, often 0.001). It is computed by transformers'
    own function over all tokens of a micro-batch, also those of prompts. 0: no such loss."""
    vision: Common[Literal["text", "frozen", "trained"]] = "text"
    """What is trained of a model that reads images: `text`, it is trained as a text model, and a
    rollout with images ends the run; `frozen`, its tower reads images and is not trained;
    `trained`, the tower is trained with the rest."""
    lora: LoraSettings | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.weights_dtype == "bfloat16" and self.compute_dtype == "float32":
            raise ValueError(
                "weights_dtype=bfloat16 needs compute_dtype=bfloat16; leave compute_dtype out"
            )
        recomputes = self.gradient_checkpointing
        if self.activation_offload and recomputes is not None and recomputes is not True:
            raise ValueError(
                "activation_offload moves what gradient_checkpointing keeps of all layers; leave "
                "that key out, or set it to true"
            )
        self._check_images()
        return self

    def _check_images(self) -> None:
        """Raises ValueError: what is set is not computed of rows with images."""
        if self.vision == "text":
            return
        unsupported = {
            f"router_replay={self.router_replay}": self.router_replay != "off",
            f"router_aux_loss={self.router_aux_loss}": self.router_aux_loss > 0,
        }
        for key in (key for key, is_set in unsupported.items() if is_set):
            raise ValueError(f"vision={self.vision}: not supported with {key}; remove one of them")
        if self.vision == "trained" and self.lora is not None:
            raise ValueError(
                "vision=trained: not supported with lora, whose adapters are on the language part "
                "only; set vision=frozen, or train all weights without lora"
            )

    def at(self, path: Path) -> Self:
        """The section for the checkpoint of this folder, whose type is the default."""
        given = self.model_dump(exclude_unset=True) | {"path": path}
        return type(self).model_validate(given)

    @property
    def micro_batch_tokens(self) -> int:
        """`max_micro_batch_tokens`, of the configuration or as decided."""
        return self.max_micro_batch_tokens or MICRO_BATCH_TOKENS

    @property
    def checkpoints(self) -> bool:
        """Whether only the inputs of layers are kept for the backward pass."""
        return bool(self.gradient_checkpointing) or self.activation_offload

    @property
    def recomputed_layers(self) -> int | None:
        """The number of layers that are recomputed, if they are not all or none."""
        count = self.gradient_checkpointing
        return None if isinstance(count, bool) else count

    @property
    def prefix_bytes(self) -> int | None:
        """`prefix_gib` in bytes; 0 with `activation_offload`."""
        if self.activation_offload:
            return 0
        return None if self.prefix_gib is None else int(self.prefix_gib * 2**30)

    @property
    def compiles(self) -> bool:
        """Whether layers are compiled on a GPU."""
        return self.compile_layers and self.compute_dtype == "bfloat16"

    @property
    def policy(self) -> str:
        """The policy whose adapter the engines serve; empty: they serve the trained weights."""
        return "" if self.lora is None or self.lora.update == "merged" else self.lora.policy


def load_settings(path: Path, key: str = "model.path") -> Any:
    """The checkpoint's `config.json`. Raises ConfigError, which names `key`, like `load_model`."""
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"{key}: {path} holds no config.json; give the folder of a Hugging Face checkpoint"
        )
    try:
        with _without_docstrings():
            settings = AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{key}: {path}: {_one_line(error)}") from error
    _refuse_quantised(settings, path, key)
    if (found := other_type(path)) is not None:
        raise ConfigError(
            f"{key}: {found[0]} is {found[1]} in {path}, and weights of that type are not trained; "
            "give the checkpoint in bfloat16 or float32 from which it was made"
        )
    check_settings(settings, path, key)
    _check_tokenizer(path, key, settings.get_text_config().vocab_size)
    return settings


@contextmanager
def _without_docstrings() -> Iterator[None]:
    """transformers writes the docstring of a configuration when its class is loaded, and loads the
    code of models and of generation for that: a third of the time of a command that trains nothing.
    """
    module: Any = sys.modules.get("transformers.utils.auto_docstring")
    if not hasattr(module, "auto_class_docstring"):  # another release: docstrings are written
        yield
        return
    written = module.auto_class_docstring
    module.auto_class_docstring = lambda given, **_: given
    try:
        yield
    finally:
        module.auto_class_docstring = written


def _refuse_quantised(settings: Any, path: Path, key: str) -> None:
    """Refuses weights in blocks of fewer bits: an export would mix the trained weights with the
    original blocks, and an engine would quantise again what is sent to it."""
    for name in QUANTISED_BESIDE:
        if (path / name).is_file():
            raise ConfigError(
                f"{key}: {path} is quantised ({name} says how), and quantised weights are not "
                "trained; give the checkpoint in bfloat16 or float32 from which it was made"
            )
    for part in (settings, settings.get_text_config()):
        for name in ("quantization_config", "compression_config"):
            if (found := getattr(part, name, None)) is None:
                continue
            given = found if isinstance(found, dict) else found.to_dict()
            method = given.get("quant_method") or given.get("quant_library") or "unknown method"
            raise ConfigError(
                f"{key}: {path} is quantised ({name}: {getattr(method, 'value', method)}), and "
                "quantised weights are not trained; give the checkpoint in bfloat16 or float32 "
                "from which it was made, or its dequantised copy without this key in config.json"
            )


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


def context_limit(settings: Any) -> int:
    """`context_tokens` of a model with this `config.json`."""
    return int(settings.get_text_config().max_position_embeddings)


def recompute(model: Any, config: ModelConfig) -> None:
    """Turns gradient checkpointing on, in the first `recomputed_layers`, or in all."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if config.recomputed_layers is not None:
        for layer in model.get_decoder().layers[config.recomputed_layers :]:
            layer.gradient_checkpointing = False
