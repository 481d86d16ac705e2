"""A template that shows no tools: the model cannot know of them, and the record says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from proxy.config import RenderingConfig
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import load_tokenizer
from tests.proxy.checkpoint import write_checkpoint
from tests.proxy.conftest import ADMIN_KEY, starting_proxies

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
ROUTES: dict[str, Any] = {
    "chat/completions": {
        "messages": [{"role": "user", "content": "Read it."}],
        "tools": [
            {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
            for name in ("read", "write")
        ],
    },
    "messages": {
        "max_tokens": 100,
        "messages": [{"role": "user", "content": "Read it."}],
        "tools": [{"name": name, "input_schema": SCHEMA} for name in ("read", "write")],
    },
    "responses": {
        "input": "Read it.",
        "tools": [
            {"type": "function", "name": name, "parameters": SCHEMA} for name in ("read", "write")
        ],
    },
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("template", "events"), [("plain.jinja", 1), ("qwen3.jinja", 0)])
async def test_event_names_tools_that_the_template_does_not_show(
    tmp_path: Path, route: str, template: str, events: int
) -> None:
    folder = write_checkpoint(tmp_path / "model", template=template)
    rendering = Rendering(load_tokenizer(folder), RenderingConfig())
    async with starting_proxies(folder, rendering, tmp_path) as start:
        proxy = await start()
        session = await proxy.session()
        for text in ("Read it.", "Read it again."):  # the same tools a second time
            key = "input" if route == "responses" else "messages"
            said = text if key == "input" else [{"role": "user", "content": text}]
            status, answer = await proxy.post(session, route, {**ROUTES[route], key: said})
            assert status == 200, answer
        await proxy.control.complete(session.trial_id)
        found = [
            event
            async for event in proxy.control.events(session.trial_id)
            if event["kind"] == "tools_left_out"
        ]
        assert len(found) == events
        for event in found:
            (part,) = event["parts"]
            assert part == {"type": "template", "at": "tools", "text": "read, write"}
        _, turns = await proxy.record(session)
        prompt = rendering.tokenizer.decode(turns[0].prompt_ids.tolist())
        assert ("write" in prompt) == (not events)
        admin = {"Authorization": f"Bearer {ADMIN_KEY}"}
        async with proxy.http.get(f"{proxy.url}/metrics", headers=admin) as response:
            counted = 'agentic_proxy_tools_left_out_total{type="template"}'
            assert (counted in await response.text()) == bool(events)
