"""An engine that computes a checkpoint with LoRA adapters, one call at a time.

Invariant: an answer depends only on the adapter's files, the prompt and the seed, not on the calls
at the same time. vLLM does not promise this to the last bit: it computes several calls in a batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from peft import PeftModel
from transformers import AutoModelForCausalLM

from proxy.testing.scripted_engine import ScriptedEngine
from proxy.testing.scripted_wires import ScriptedCall


class AdapterEngine(ScriptedEngine):
    def __init__(self, model: Path, policies: int) -> None:
        """No call is answered before `policies` different policies have been called."""
        super().__init__(lambda _: [], model=str(model))
        self.sampled_from: list[str] = []
        """The policy of each call, in the order of arrival."""
        self._path = model
        self._served: dict[str, Any] = {}
        self._policies = policies
        self._all_called = asyncio.Event()

    def build_app(self) -> web.Application:
        app = super().build_app()
        app.router.add_post("/v1/load_lora_adapter", self._load)
        app.router.add_post("/v1/unload_lora_adapter", self._unload)
        return app

    async def _models(self, _: web.Request) -> web.Response:
        own = {"id": self.model, "max_model_len": self.max_context_tokens}
        adapters = [{"id": name, "parent": self.model} for name in self._served]
        return web.json_response({"object": "list", "data": [own, *adapters]})

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        base = AutoModelForCausalLM.from_pretrained(self._path, dtype=torch.float32)
        name = body["lora_name"]
        self._served[name] = PeftModel.from_pretrained(base, body["lora_path"]).eval()
        self.adapters[name] = self.script
        return web.Response(text="loaded")

    async def _unload(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        del self._served[name], self.adapters[name]
        return web.Response(text="unloaded")

    async def _sample(self, call: ScriptedCall) -> AsyncIterator[int]:
        name = call.model or ""
        model = self._served[name]  # also if it is unloaded while the call waits
        self.sampled_from.append(name.partition("@")[0])
        if len(set(self.sampled_from)) == self._policies:
            self._all_called.set()
        await self._all_called.wait()
        self._answer(model, call)
        for at in range(1, len(call.answer_ids)):
            yield at

    @torch.no_grad()
    def _answer(self, model: Any, call: ScriptedCall) -> None:
        draws = torch.Generator().manual_seed(call.sampling["seed"])
        stops = call.sampling["stop_token_ids"]
        call.finish_reason = "length"
        while len(call.answer_ids) < call.sampling["max_tokens"]:
            ids = torch.tensor([call.path])
            logprobs = model(ids).logits[0, -1].log_softmax(-1)
            token = int(torch.multinomial(logprobs.exp(), 1, generator=draws))
            call.answer_ids.append(token)
            call.logprobs.append(float(logprobs[token]))
            call.versions.append(0)
            if token in stops:
                call.finish_reason = "stop"
                return
