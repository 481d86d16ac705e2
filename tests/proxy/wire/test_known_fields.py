"""Every field that an API declares has a decided outcome, which is the one that it has."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import orjson
import pytest
from anthropic.types import message_create_params
from anthropic.types.beta import message_create_params as beta_message_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from proxy.wire.body import Body, parse_body
from proxy.wire.fields_page import page
from proxy.wire.known_fields import HARMLESS, HONOURED, REFUSED, refused_in
from proxy.wire.registry import open_dialects
from tests.proxy.conftest import ADMIN_KEY, RunningProxy, StartProxy

SGLANG = """
bootstrap_host bootstrap_port bootstrap_room cache_salt custom_labels custom_logit_processor
custom_params data_parallel_rank disagg_prefill_dp_rank ebnf extra_key ignore_eos images_config
json_schema lora_path min_p min_tokens ngram_corpus_id no_stop_trim priority regex
repetition_penalty return_cached_tokens_details return_hidden_states return_meta_info
return_prompt_token_ids return_routed_experts rid routed_dp_rank routed_experts_start_len
session_id session_params skip_special_tokens stop_regex stop_token_ids top_k input_ids
max_dynamic_patch min_dynamic_patch use_audio_in_video separate_reasoning stream_reasoning
chat_template_kwargs continue_final_message task reasoning_effort
"""
"""The fields of `ChatCompletionRequest` in SGLang's `protocol.py` (commit 004c82e) that are not in
OpenAI's SDK; its `CompletionRequest` has no other ones."""
ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("chat/completions", {"messages": [{"role": "user", "content": "Hi."}]}),
    "completions": ("completions", {"prompt": "Hi."}),
    "messages": ("messages", {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 9}),
    "responses": ("responses", {"input": "Hi."}),
}
VLLM = Path(str((find_spec("vllm") or find_spec("pytest")).origin)).parent
VLLM_CLASSES = {
    "chat": ("chat_completion/protocol.py", "ChatCompletionRequest"),
    "completions": ("completion/protocol.py", "CompletionRequest"),
    "responses": ("responses/protocol.py", "ResponsesRequest"),
}


def declared(dialect: str) -> set[str]:
    """The fields of the request in the installed SDKs."""
    types: dict[str, list[Any]] = {
        "chat": [chat_create_params.CompletionCreateParamsBase],
        "completions": [completion_create_params.CompletionCreateParamsBase],
        "messages": [
            message_create_params.MessageCreateParamsBase,
            beta_message_create_params.MessageCreateParamsBase,
        ],
        "responses": [response_create_params.ResponseCreateParamsBase],
    }
    return {name for kind in types[dialect] for name in kind.__annotations__}


def vllm_fields(file: Path, name: str) -> set[str]:
    """The public fields of a class, read from its source: importing vLLM takes half a minute."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ClassDef) and node.name == name:
            fields = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
            return {each.id for each in fields if isinstance(each, ast.Name) and each.id[0] != "_"}
    raise AssertionError(f"{file} has no class {name}")


def undecided(dialect: str, names: set[str]) -> set[str]:
    return names - HONOURED[dialect] - REFUSED.keys() - HARMLESS.keys()


@pytest.mark.parametrize("dialect", ROUTES)
def test_every_field_of_the_installed_sdks_is_decided(dialect: str) -> None:
    assert undecided(dialect, declared(dialect)) == set()


@pytest.mark.parametrize("dialect", VLLM_CLASSES)
def test_every_field_of_the_installed_vllm_is_decided(dialect: str) -> None:
    file, name = VLLM_CLASSES[dialect]
    fields = vllm_fields(VLLM / "entrypoints" / "openai" / file, name)
    assert "temperature" in fields
    assert undecided(dialect, fields) == set()


def test_every_field_of_sglang_is_decided() -> None:
    assert undecided("chat", set(SGLANG.split())) == set()
    assert undecided("completions", set(SGLANG.split()) - {"continue_final_message"}) == set()


def test_page_is_the_list() -> None:
    written = Path("docs/fields.md").read_text()
    assert written == page(), "run: python -m proxy.wire.fields_page > docs/fields.md"


@pytest.mark.parametrize("dialect", ROUTES)
async def test_harmless_fields_and_neutral_values_change_no_sampled_token(
    proxy: RunningProxy, dialect: str
) -> None:
    route, body = ROUTES[dialect]

    async def sampled(**more: Any) -> tuple[Any, ...]:
        session = await proxy.session()
        status, answer = await proxy.post(session, route, {**body, **more})
        assert status == 200, answer
        _, (turn,) = await proxy.record(session)
        params = proxy.engine.calls[-1].sampling
        return turn.prompt_ids.tolist(), turn.sampled_ids.tolist(), turn.sampling, params

    alone = await sampled()
    for value in (True, 1, "x", {"type": "x"}, [{"x": 1}], None):
        fields = dict.fromkeys(HARMLESS.keys() - HONOURED[dialect], value)
        assert await sampled(**fields) == alone, value
    for at in range(2):
        neutral = {name: values[at : at + 1] or (None,) for name, values in REFUSED.items()}
        fields = {n: value for n, (value,) in neutral.items() if n in refused_in(dialect)}
        assert await sampled(**fields) == alone, fields


@pytest.mark.parametrize("dialect", ROUTES)
async def test_refused_field_is_named_with_any_other_value(
    proxy: RunningProxy, dialect: str
) -> None:
    route, body = ROUTES[dialect]
    session = await proxy.session()
    for name in sorted(refused_in(dialect)):
        value = next(v for v in (7, ["x"]) if v not in REFUSED[name])
        status, answer = await proxy.post(session, route, {**body, name: value})
        assert status == 400, name
        assert answer["error"]["message"].startswith(f"{name}: ")


EXAMPLES: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 7,
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "seed": 3,
    "model": "m",
    "stream": True,
    "tools": [],
    "tool_choice": "none",
    "messages": [{"role": "user", "content": "Other."}],
    "prompt": "Other.",
    "input": "Other.",
    "system": "Be brief.",
    "instructions": "Be brief.",
    "max_tokens": 5,
    "max_completion_tokens": 5,
    "max_output_tokens": 5,
    "n": 2,
    "stop": ["x"],
    "stop_sequences": ["x"],
    "logprobs": 1,
    "top_logprobs": 1,
    "echo": True,
    "response_format": {"type": "json_object"},
    "output_config": {"format": {"type": "json_schema", "schema": {}}},
    "output_format": {"type": "json_schema", "schema": {}},
    "text": {"format": {"type": "json_object"}},
    "parallel_tool_calls": False,
    "stream_options": {"include_usage": True},
    "return_token_ids": True,
    "continue_final_message": True,
    "thinking": {"type": "enabled", "budget_tokens": 99},
    "previous_response_id": "resp_0_x",
    "include": ["message.output_text.logprobs"],
}


@pytest.mark.parametrize("dialect", ROUTES)
def test_honoured_fields_reach_the_call(dialect: str) -> None:
    route, body = ROUTES[dialect]
    parser = open_dialects()[route]

    def parsed(**more: Any) -> Any:
        call = parser.parse(parse_body(Body(orjson.dumps({**body, **more}))), {})
        call.extra.pop("created", None)
        return call

    chat_tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    own: dict[str, dict[str, Any]] = {
        "chat": {
            "logprobs": True,
            "tools": [chat_tool],
            "top_logprobs": 1,
            "continue_final_message": True,
        },
        "messages": {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "none"}},
        "responses": {"tools": [{"type": "function", "name": "f", "parameters": {}}]},
        "completions": {},
    }
    beside: dict[str, dict[str, Any]] = {
        "top_logprobs": {"logprobs": True, "include": ["message.output_text.logprobs"]},
        "continue_final_message": {
            "messages": [*body.get("messages", []), {"role": "assistant", "content": "So"}]
        },
    }
    for name in HONOURED[dialect]:
        extra = {k: v for k, v in beside.get(name, {}).items() if k in HONOURED[dialect]}
        example = own[dialect].get(name, EXAMPLES[name])
        if name == "logprobs" and dialect == "completions":
            example = 1
        assert parsed(**extra, **{name: example}) != parsed(**extra), name


async def test_field_that_nobody_knows_is_an_event_and_a_metric_or_refused(
    proxy: RunningProxy, start_proxy: StartProxy, tmp_path: Path
) -> None:
    session = await proxy.session()
    body = {**ROUTES["chat"][1], "temprature": 0.1, "x": 1}
    for _ in range(2):
        status, _ = await proxy.post(session, "chat/completions", body)
        assert status == 200
    await proxy.control.complete(session.trial_id)
    events = [event async for event in proxy.control.events(session.trial_id)]
    named = [event["names"] for event in events if event["kind"] == "unknown_fields"]
    assert named == [["temprature", "x"]]
    admin = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with proxy.http.get(f"{proxy.url}/metrics", headers=admin) as response:
        metrics = await response.text()
    assert 'unknown_fields_total{dialect="chat",name="temprature"} 2.0' in metrics

    strict = await start_proxy(store=f"sqlite:///{tmp_path}/strict.db", unknown_fields="refuse")
    status, answer = await strict.post(await strict.session(), "chat/completions", body)
    assert status == 400
    assert answer["error"]["param"] == "temprature"
