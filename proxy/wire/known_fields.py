"""What becomes of each field of a request: it is honoured, refused, or does not matter.

The names are those of OpenAI's and Anthropic's SDKs and of the servers vLLM and SGLang. Invariant:
a field with a known name that would change what is sampled is honoured, or refused with a 400 that
names it; one that is listed as harmless changes no sampled token. Every other name is unknown:
`Call.unknown` has it, and it is counted, or refused if the proxy is told so.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from proxy.wire.fields import Fields


def _names(text: str) -> list[str]:
    return text.split()


_SAMPLING = _names(
    "temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty seed"
)
_COMMON = [*_SAMPLING, "model", "stream", "tools", "tool_choice"]
_CHAT = _names(
    "messages max_tokens max_completion_tokens n stop logprobs top_logprobs response_format "
    "parallel_tool_calls stream_options return_token_ids continue_final_message"
)
_COMPLETIONS = _names(
    "model stream prompt max_tokens n stop logprobs echo response_format stream_options"
)
_MESSAGES = _names("messages system max_tokens stop_sequences output_config output_format thinking")
_RESPONSES = _names(
    "input instructions max_output_tokens previous_response_id include top_logprobs text "
    "parallel_tool_calls stop"
)
HONOURED: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "chat": frozenset([*_COMMON, *_CHAT]),
        "completions": frozenset([*_SAMPLING, *_COMPLETIONS]),
        "messages": frozenset([*_COMMON, *_MESSAGES]),
        "responses": frozenset([*_COMMON, *_RESPONSES]),
    }
)
"""By dialect: the fields that do what their protocol says."""

REFUSED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        # OpenAI's
        "audio": (),
        "background": (False,),
        "best_of": (1,),
        "conversation": (),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "image": (),
        "logit_bias": ({},),
        "modalities": (["text"],),
        "prompt": (),
        "suffix": ("",),
        "web_search_options": (),
        # Anthropic's
        "mcp_servers": ([],),
        "thread": (),
        # vLLM's
        "add_generation_prompt": (True,),
        "add_special_tokens": (False,),
        "allowed_token_ids": ([],),
        "bad_words": ([],),
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "documents": ([],),
        "echo": (False,),
        "guided_choice": (),
        "guided_grammar": (),
        "guided_json": (),
        "guided_regex": (),
        "ignore_eos": (False,),
        "include_stop_str_in_output": (False,),
        "length_penalty": (1,),
        "logprob_token_ids": ([],),
        "media_io_kwargs": ({},),
        "min_tokens": (0,),
        "mm_payload": ({},),
        "mm_processor_kwargs": ({},),
        "previous_input_messages": ([],),
        "prompt_embeds": (),
        "prompt_logprobs": (),
        "repetition_detection": (),
        "stop_token_ids": ([],),
        "structured_outputs": ({},),
        "thinking_token_budget": (-1,),
        "truncate_prompt_tokens": (),
        "truncation_side": (),
        "use_beam_search": (False,),
        "vllm_xargs": ({},),
        "watermarking": (False, {}),
        # SGLang's
        "custom_logit_processor": (),
        "custom_params": ({},),
        "ebnf": (),
        "images_config": ({},),
        "input_ids": ([],),
        "json_schema": (),
        "lora_path": (),
        "max_dynamic_patch": (),
        "min_dynamic_patch": (),
        "no_stop_trim": (False,),
        "regex": (),
        "sampling_seed": (),
        "session_params": ({},),
        "stop_regex": ([], ""),
        "task": (),
        "use_audio_in_video": (False,),
        # other servers'
        "dry_multiplier": (0,),
        "grammar": ("",),
        "min_new_tokens": (0,),
        "mirostat": (0,),
        "num_ctx": (),
        "repeat_last_n": (),
        "repeat_penalty": (1,),
        "samplers": (),
        "tfs_z": (1,),
        "top_a": (0,),
        "typical_p": (1,),
        "xtc_probability": (0,),
    }
)
"""Fields that would change what is sampled (or what the answer holds) and that no engine receives,
each with the values that change nothing. Null is one of them. A field that a dialect honours is not
refused there."""

ONLY_IN: Mapping[str, str] = MappingProxyType(
    {
        "conversation": "responses",
        "image": "responses",
        "prompt": "responses",
        "task": "chat",
        "thread": "messages",
    }
)
"""Names of `REFUSED` that are everyday words: the only dialect in which they mean something."""

HARMLESS: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(
        [
            "metadata",
            "moderation",
            "safety_identifier",
            "service_tier",
            "store",
            "user",
            "access_programs",
            "background_options",
            "betas",
            "billing_policy",
            "container",
            "diagnostics",
            "fallback_credit_token",
            "fallbacks",
            "inference_geo",
            "speed",
            "user_profile_id",
            "workspace_id",
            "custom_labels",
        ],
        "for the provider's own records, prices and routes",
    )
    | dict.fromkeys(
        [
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "prediction",
            "cache_control",
            "cache_salt",
            "priority",
            "kv_transfer_params",
            "ec_transfer_params",
            "bootstrap_host",
            "bootstrap_port",
            "bootstrap_room",
            "data_parallel_rank",
            "disagg_prefill_dp_rank",
            "extra_key",
            "ngram_corpus_id",
            "rid",
            "routed_dp_rank",
            "request_id",
            "session_id",
            "stream_interval",
        ],
        "about caches, routes and speed",
    )
    | dict.fromkeys(
        ["reasoning", "reasoning_effort", "verbosity", "enable_thinking"],
        "a hint for the provider's own models; the policy reasons as its chat template says "
        "(rendering.template_kwargs)",
    )
    | dict.fromkeys(
        ["context_management", "compaction", "truncation", "max_tool_calls"],
        "about what a provider does on its side; the agent gets the error of a full context",
    )
    | dict.fromkeys(
        [
            "include_reasoning",
            "separate_reasoning",
            "stream_reasoning",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "return_mm_kwargs",
            "return_prompt_text",
            "return_token_offsets",
            "return_tokens_as_token_ids",
            "return_hidden_states",
            "return_routed_experts",
            "return_meta_info",
            "return_cached_tokens_details",
            "return_prompt_token_ids",
            "return_token_ids",
            "stream_options",
            "routed_experts_prompt_start",
            "routed_experts_start_len",
            "enable_response_messages",
        ],
        "about how the answer is written",
    )
    | dict.fromkeys(["parallel_tool_calls"], "without tools"),
)
"""Fields that change no sampled token where no dialect honours them, each with the reason."""


def unknown_fields(fields: Fields, dialect: str) -> tuple[str, ...]:
    """The names of a request's fields that nobody knows.

    Raises RequestError for a known field that would change what is sampled and is not honoured.
    """
    honoured = HONOURED[dialect]
    if fields.data.keys() <= honoured:
        return ()
    unknown = []
    for name in fields.data:
        if name in honoured:
            continue
        if name in REFUSED and ONLY_IN.get(name, dialect) == dialect:
            _refuse_unless_neutral(fields, name)
        elif name not in HARMLESS:
            unknown.append(name)
    return tuple(unknown)


def refused_in(dialect: str) -> frozenset[str]:
    """The known fields that the dialect refuses, unless they have a neutral value."""
    elsewhere = {name for name, only in ONLY_IN.items() if only != dialect}
    return frozenset(REFUSED) - HONOURED[dialect] - elsewhere


def _refuse_unless_neutral(fields: Fields, name: str) -> None:
    value = fields.get(name)
    if value is None or any(value == neutral for neutral in REFUSED[name]):
        return
    if name == "add_generation_prompt" and fields.get("continue_final_message") is True:
        return  # false is what vLLM wants then
    raise fields.refuse(name, "no value (the proxy does not support this parameter)")
