"""The architectures of docs/models.md: tiny random models of each published class.

Some are computed by `trainer.extras.experts`, `trainer.extras.hybrids` or `trainer.extras.images`.

`tests.trainer.policy.table` computes every one packed, as a tree, and by its own code path by path,
and writes the table. The tests compute the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import CONFIG_MAPPING


@dataclass(frozen=True, slots=True)
class Architecture:
    """Example: Architecture("Qwen 3", "qwen3", renderer="qwen3")"""

    title: str
    kind: str
    """`model_type` of the published `config.json`."""
    renderer: str = "template"
    """Its family in the `renderers` package; `template`: the checkpoint's chat template."""
    changes: dict[str, Any] = field(default_factory=dict)
    """What the published models set otherwise than the configuration's defaults."""
    refused: str = ""
    """A pattern of the refusal; empty: it is trained."""

    def settings(self) -> Any:
        """The published configuration, composite where a model with images is published."""
        settings = CONFIG_MAPPING[self.kind]()
        for name, value in self.changes.items():
            setattr(settings.get_text_config(), name, value)
        return settings


LONGROPE = {
    "original_max_position_embeddings": 4096,
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 48,
        "long_factor": [2.0] * 48,
        "original_max_position_embeddings": 4096,
    },
}

ARCHITECTURES = (
    Architecture("Llama 3", "llama", "llama-3", {"num_key_value_heads": 8}),
    Architecture("Qwen 2.5", "qwen2"),
    Architecture("Qwen 3", "qwen3", "qwen3"),
    Architecture("Qwen 3 MoE", "qwen3_moe", "qwen3"),
    Architecture("Qwen3-Next", "qwen3_next"),
    Architecture("Qwen 3.5", "qwen3_5", "qwen3.5"),
    Architecture("Qwen 3.5 MoE", "qwen3_5_moe", "qwen3.5"),
    Architecture("Gemma 2", "gemma2"),
    Architecture("Gemma 3", "gemma3"),
    Architecture("Gemma 4", "gemma4", "gemma4"),
    Architecture("Mistral", "mistral"),
    Architecture("Mixtral", "mixtral"),
    Architecture("Phi-3 (4k)", "phi3"),
    Architecture("Phi-3 (128k), Phi-4-mini", "phi3", "template", LONGROPE, "rope_type=longrope"),
    Architecture("gpt-oss", "gpt_oss", "gpt-oss"),
    Architecture("GLM-4", "glm4"),
    Architecture("GLM-4.5 MoE", "glm4_moe", "glm-4.5"),
    Architecture("DeepSeek-V3", "deepseek_v3", "deepseek-v3"),
    Architecture(
        "Granite 3", "granite", changes={"logits_scaling": 8.0, "attention_multiplier": 0.01}
    ),
    Architecture("Granite 3 MoE", "granitemoe", changes={"attention_multiplier": 0.01}),
    Architecture("SmolLM3", "smollm3"),
    Architecture("OLMo 3", "olmo3"),
    Architecture("OLMo Hybrid", "olmo_hybrid"),
    Architecture("MiniMax-M2", "minimax_m2", "minimax-m2"),
    Architecture("Seed-OSS", "seed_oss"),
    Architecture("Cohere 2", "cohere2"),
    Architecture("MiMo-V2-Flash", "mimo_v2_flash"),
    Architecture("Kimi-Linear", "kimi_linear", refused=r"layer \d+ \(linear_attention\) differs"),
    Architecture("Nemotron-H", "nemotron_h", refused="layers of type"),
    Architecture("Gemma 3n", "gemma3n", refused="differs from its own"),
    Architecture("Llama 4", "llama4", refused="."),
)
