"""Combinations of parts from papers, by name. All other keys have their default values."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_SEQUENCES = "sequence_mean_token_mean"

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # Schulman et al. 2017, with a critic.
        "ppo": {"advantage": {"name": "gae"}, "critic": {}, "aggregation": "token_mean"},
        # DeepSeekMath, arXiv 2402.03300.
        "grpo": {
            "advantage": {"name": "grpo"},
            "aggregation": _SEQUENCES,
            "kl": {"coefficient": 0.04, "estimator": "k3", "where": "loss"},
        },
        # arXiv 2503.20783; the constant is the maximum length of one generation.
        "dr_grpo": {
            "advantage": {"name": "dr_grpo"},
            "aggregation": {"name": "sequence_mean_token_sum_norm", "max_tokens": 4096},
        },
        # arXiv 2503.14476; the overlong penalty needs a length: set reward.overlong.
        "dapo": {
            "advantage": {"name": "grpo"},
            "loss": {"name": "ppo", "clip_low": 0.2, "clip_high": 0.28},
            "aggregation": "token_mean",
            "groups": "with_signal",
        },
        # arXiv 2507.18071.
        "gspo": {
            "advantage": {"name": "grpo"},
            "loss": {"name": "gspo"},
            "aggregation": _SEQUENCES,
        },
        # MiniMax-M1, arXiv 2506.13585.
        "cispo": {
            "advantage": {"name": "grpo"},
            "loss": {"name": "cispo"},
            "aggregation": "token_mean",
        },
        # arXiv 2511.20347.
        "sapo": {
            "advantage": {"name": "grpo"},
            "loss": {"name": "sapo"},
            "aggregation": _SEQUENCES,
        },
        # Back to basics, arXiv 2402.14740: no clipping.
        "rloo": {"advantage": {"name": "rloo"}, "loss": {"name": "reinforce"}},
        # arXiv 2501.03262.
        "reinforce++": {
            "advantage": {"name": "reinforce++"},
            "aggregation": "token_mean",
            "kl": {"coefficient": 0.001, "estimator": "k1", "where": "reward"},
        },
        "reinforce++_baseline": {
            "advantage": {"name": "reinforce++_baseline"},
            "aggregation": "token_mean",
            "kl": {"coefficient": 0.001, "estimator": "k2", "where": "loss"},
        },
        # arXiv 2508.08221.
        "lite_ppo": {"advantage": {"name": "lite_ppo"}, "aggregation": "token_mean"},
        # arXiv 2505.23585: exactly on-policy.
        "opo": {
            "advantage": {"name": "opo"},
            "loss": {"name": "reinforce"},
            "aggregation": "token_mean",
        },
        # arXiv 2504.02546.
        "gpg": {
            "advantage": {"name": "gpg"},
            "loss": {"name": "reinforce"},
            "aggregation": "token_mean",
        },
        # arXiv 2508.10751.
        "pass_at_k": {"advantage": {"name": "pass_at_k"}, "aggregation": "token_mean"},
        # AReaL, arXiv 2505.24298: PPO around π_prox, weighted by π_prox / π_b.
        "decoupled_ppo": {
            "advantage": {"name": "grpo"},
            "prox": "recompute",
            "correction": {"weight": {"name": "mask", "level": "token", "upper": 5.0}},
            "aggregation": "token_mean",
        },
        # arXiv 2510.01161, for data that is many versions old.
        "m2po": {
            "advantage": {"name": "grpo"},
            "correction": {
                "weight": None,
                "reject": [{"name": "second_moment", "threshold": 0.04}],
            },
            "aggregation": "token_mean",
        },
        # Rejection-sampled fine-tuning: the log-likelihood of accepted rollouts.
        "sft": {
            "advantage": {"name": "accepted"},
            "loss": {"name": "reinforce"},
            "prox": "behaviour",
            "correction": {"weight": None},
            "aggregation": "token_mean",
        },
    }
)


def merge(preset: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The preset's keys, overridden by `given` key by key; a part with another `name` replaces the
    preset's part completely."""
    merged = dict(preset)
    for key, value in given.items():
        base = merged.get(key)
        same_part = (
            isinstance(base, Mapping)
            and isinstance(value, Mapping)
            and value.get("name", base.get("name")) == base.get("name")
        )
        merged[key] = merge(base, value) if same_part else value  # type: ignore[arg-type]
    return merged
