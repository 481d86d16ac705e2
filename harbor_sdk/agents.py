"""Gives each of Harbor's agents the base URL, key and model name in the way that it reads them.

Invariant: `env` contains the key under a name that Harbor treats as a secret, so that Harbor
removes it from the trial's folder. Values that the caller set are never overwritten.
"""

from __future__ import annotations

from harbor_sdk.direct_hosts import with_direct_hosts
from harbor_sdk.models import AgentSpec

BASE_URLS = ("ANTHROPIC_BASE_URL", "OPENAI_BASE_URL")
"""Variables that name the server of an agent's session."""

# These agents take a base URL without `/v1`; all other agents read the OpenAI variables.
_ANTHROPIC_AGENTS = frozenset({"claude-code"})

# Harbor calls the model for these agents from its own process through LiteLLM, and passes the
# keyword arguments on.
_LITELLM_AGENTS = frozenset({"terminus", "terminus-1", "terminus-2"})


# SWE-agent stops immediately if LiteLLM does not know the model's price and context; 0 is no limit.
_SWE_AGENT_LIMITS = ("per_instance_cost_limit", "total_cost_limit", "max_input_tokens")


def connect(agent: AgentSpec, base_url: str, api_key: str | None) -> AgentSpec:
    """Returns `agent` with `base_url` (which ends in `/v1`) and `api_key` where it reads them.

    Example: connect(AgentSpec(name="claude-code"), "http://h/t-1/v1", "sk-1").env ==
        {"ANTHROPIC_BASE_URL": "http://h/t-1", "ANTHROPIC_API_KEY": "sk-1"}
    """
    name, key = agent.name or "", api_key or "none"
    env, kwargs, model = dict(agent.env), dict(agent.kwargs), agent.model_name
    if name in _ANTHROPIC_AGENTS:
        own_env = {
            "ANTHROPIC_BASE_URL": base_url.removesuffix("/").removesuffix("/v1"),
            "ANTHROPIC_API_KEY": key,
        }
        provider = "anthropic"
    else:
        own_env = {
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_BASE": base_url,
            "OPENAI_API_KEY": key,
            "LLM_BASE_URL": base_url,
            "LLM_API_KEY": key,
            # Otherwise LiteLLM downloads its price list, which does not contain the policy.
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "MSWEA_COST_TRACKING": "ignore_errors",
        }
        provider = "openai"
    if name in _LITELLM_AGENTS:
        kwargs.setdefault("api_base", base_url)
        call = {"api_key": key, **(kwargs.get("llm_call_kwargs") or {})}
        kwargs["llm_call_kwargs"] = call
    if name == "swe-agent":
        kwargs = {**dict.fromkeys(_SWE_AGENT_LIMITS, 0), **kwargs}
    if model and "/" not in model:
        model = f"{provider}/{model}"
    return agent.model_copy(
        update={
            "env": with_direct_hosts({**own_env, **env}, base_url),
            "kwargs": kwargs,
            "model_name": model,
        }
    )
