"""Ordinary request bodies of every server: what the fuzz run mutates."""

from __future__ import annotations

import base64
from collections.abc import Callable
from copy import deepcopy

from proxy.testing.scripted_images import PICTURE
from tests.attacks.hostile import Body

TOOL = {"name": "shell", "description": "Runs a command.", "parameters": {"type": "object"}}
SCREEN, CLICKED = (base64.b64encode(PICTURE + each).decode() for each in (b"screen", b"clicked"))
"""Two images. A mutated one is another image, or none."""


def _url(picture: str) -> str:
    return f"data:image/png;base64,{picture}"


def _block(picture: str) -> Body:
    source = {"type": "base64", "media_type": "image/png", "data": picture}
    return {"type": "image", "source": source}


BODIES: dict[str, Callable[[], Body]] = {
    "chat/completions": lambda: {
        "model": "m",
        "max_tokens": 16,
        "temperature": 0.5,
        "stop": ["END"],
        "messages": [
            {"role": "system", "content": "Be brief."},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "List the files."},
                    {"type": "image_url", "image_url": {"url": _url(SCREEN), "detail": "high"}},
                ],
            },
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "Hm.",
                "tool_calls": [
                    {
                        "id": "call-1",
                        "type": "function",
                        "function": {"name": "shell", "arguments": '{"command": "ls", "n": 1.5}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call-1", "content": "a.txt"},
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": _url(CLICKED)}}],
            },
        ],
        "tools": [{"type": "function", "function": deepcopy(TOOL)}],
        "tool_choice": "auto",
        "stream_options": {"include_usage": True},
    },
    "completions": lambda: {"model": "m", "prompt": "Once upon", "max_tokens": 8, "n": 1},
    "responses": lambda: {
        "model": "m",
        "instructions": "Be brief.",
        "max_output_tokens": 16,
        "input": [
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "List the files."},
                    {"type": "input_image", "image_url": _url(SCREEN), "detail": "auto"},
                ],
            },
            {"type": "function_call", "call_id": "c", "name": "shell", "arguments": "{}"},
            {
                "type": "function_call_output",
                "call_id": "c",
                "output": [{"type": "input_image", "image_url": _url(CLICKED)}],
            },
            {"type": "reasoning", "id": "r", "summary": []},
        ],
        "tools": [{"type": "function", **deepcopy(TOOL)}],
        "text": {"format": {"type": "text"}},
    },
    "messages": lambda: {
        "model": "m",
        "max_tokens": 16,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [_block(SCREEN), {"type": "text", "text": "List them."}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": ""},
                    {"type": "tool_use", "id": "t", "name": "shell", "input": {"command": "ls"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t",
                        "content": [{"type": "text", "text": "a.txt"}, _block(CLICKED)],
                    }
                ],
            },
        ],
        "tools": [{"name": "shell", "input_schema": {"type": "object"}}],
    },
}
CONTROL: dict[str, Callable[[], Body]] = {
    "POST /sessions": lambda: {"kind": "train", "metadata": {"task": 1}, "ttl_s": 60},
    "POST /sessions/S/rewards": lambda: {"key": "k", "value": 1.0, "parts": {"a": 0.5}},
    "POST /sessions/S/complete": dict,
    "POST /engines": lambda: {"url": "http://127.0.0.1:9", "name": "e"},
    "DELETE /engines/e": dict,
    "POST /engines/resume": dict,
    "PUT /policies/default/version": lambda: {"version": 3},
    "DELETE /policies/default/runs/r": dict,
    "GET /sessions": dict,
    "GET /sessions/S": dict,
    "GET /sessions/S/trajectories": dict,
    "GET /engines": dict,
    "GET /metrics": dict,
    "GET /openapi.json": dict,
    "GET /ready": dict,
    "DELETE /sessions/none": dict,
}
END: Body = {
    "task_id": "t",
    "reward": 1.0,
    "reward_parts": {"a": 0.5},
    "turn_rewards": {"0": 0.5},
    "metadata": {"a": 1},
}
"""How an episode of a swarm ended."""
RUN: Body = {
    "job_id": "j",
    "task_id": "t",
    "task_name": "org/name",
    "agent": {"name": "oracle", "kwargs": {"a": 1}, "env": {"A": "b"}},
    "environment": {"type": "docker", "kwargs": {}, "env": {}},
    "verifier": {"disable": False},
    "environment_overrides": {"override_cpus": 1},
    "llm_proxy_url": "http://127.0.0.1:9/v1",
    "artifacts": ["/a"],
    "extra_instructions": ["b"],
}
"""A run of harbor-server."""
SWARM: dict[str, Callable[[], Body]] = {
    "POST /v1/episodes": lambda: {
        "client_id": "c",
        "task_id": "t",
        "source": "default",
        "lease_s": 1,
        "wait_s": 0.05,
    },
    "POST /v1/episodes/ID/heartbeat": dict,
    "POST /v1/episodes/ID/prepare": lambda: {
        "end": deepcopy(END),
        "decider": {"url": "http://127.0.0.1:9", "episode_id": "e", "key": "k"},
    },
    "POST /v1/episodes/ID/end": lambda: deepcopy(END),
    "POST /v1/episodes/ID/abort": lambda: {"reason": "r"},
    "POST /v1/agree": lambda: {"client_id": "c"},
    "PUT /v1/config": lambda: {"config": "model: {path: m}"},
    "POST /v1/start": dict,
    "POST /v1/stop": dict,
    "POST /trainer/next_batch": lambda: {"version": 1, "wait_s": 0},
    "GET /v1/episodes/ID/outcome": dict,
    "GET /v1/episodes?limit=N": dict,
    "GET /v1/status?since=N&wait_s=0.1": dict,
    "GET /v1/events": dict,
    "GET /v1/config": dict,
    "GET /v1/tasks?limit=N": dict,
    "GET /ready": dict,
    "GET /metrics": dict,
    "GET /trainer/records/ID": dict,
}
HARBOR: dict[str, Callable[[], Body]] = {
    "POST /api/v1/runs?wait_s=0": lambda: deepcopy(RUN),
    "POST /api/v1/runs": lambda: deepcopy(RUN),
    "GET /api/v1/runs?job_id=j&limit=N&offset=N": dict,
    "GET /api/v1/runs?status=N": dict,
    "GET /api/v1/runs/ID?wait_s=0.1": dict,
    "DELETE /api/v1/runs/ID": dict,
    "GET /api/v1/runs/ID/events": dict,
    "GET /api/v1/runs/ID/logs?tail_bytes=N": dict,
    "GET /api/v1/runs/ID/artifacts": dict,
    "GET /api/v1/runs/ID/artifacts/agent/out.txt": dict,
    "GET /api/v1/runs/ID/artifacts/N": dict,
}
