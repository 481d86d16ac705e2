"""A real vLLM with a model that reads images, asked by its own routes.

prepare   POST /v1/chat/completions/render   message with images → ids, spans, pixels
sample    POST /inference/v1/generate        ids, with `features` or `content_parts` → ids
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
from PIL import Image

MODEL = "tiny"
RENDER = "/v1/chat/completions/render"
GENERATE = "/inference/v1/generate"
TIMEOUT = aiohttp.ClientTimeout(120)
Part = Image.Image | str
Json = dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """Ids with the spans of their images: runs of the image token, without the markers around."""

    ids: list[int]
    spans: list[Json]
    hashes: list[str]
    data: list[str]
    """One base64 `MultiModalKwargsItem` for each image."""

    def features(self, **changes: list[Any] | None) -> Json:
        """The field of `GENERATE`. `changes`: hashes, spans or data instead of its own."""
        given: Json = {"hashes": self.hashes, "spans": self.spans, "data": self.data, **changes}
        data = given["data"]
        return {
            "mm_hashes": {"image": given["hashes"]},
            "mm_placeholders": {"image": given["spans"]},
            "kwargs_data": None if data is None else {"image": data},
        }

    @property
    def collapsed(self) -> list[int]:
        """The ids with one image token for each image, as `content_parts` needs them."""
        left_out = {at for span in self.spans for at in range(span["offset"] + 1, _end(span))}
        return [token for at, token in enumerate(self.ids) if at not in left_out]


@dataclass(frozen=True)
class Sampled:
    status: int
    answer: Json

    @property
    def ids(self) -> list[int]:
        return list(self._choice["token_ids"])

    @property
    def all_ids(self) -> list[int]:
        return [*self.answer["prompt_token_ids"], *self.ids]

    @property
    def cached_tokens(self) -> int:
        return int((self.answer["usage"]["prompt_tokens_details"] or {})["cached_tokens"])

    @property
    def sampled_logprobs(self) -> list[float]:
        return [each["logprob"] for each in self._choice["logprobs"]["content"]]

    @property
    def logprobs(self) -> np.ndarray:
        """Of all ids but the first, `[len(all_ids) - 1]`."""
        prompt = zip(self.answer["prompt_token_ids"], self.answer["prompt_logprobs"], strict=True)
        values = [each[str(token)]["logprob"] for token, each in prompt if each]
        return np.array([*values, *self.sampled_logprobs])

    @property
    def _choice(self) -> Json:
        return dict(self.answer["choices"][0])


class ImageEngine:
    """Example: await ImageEngine(http, url, image_token=365).prepare([picture, "What?"])"""

    def __init__(self, http: aiohttp.ClientSession, url: str, image_token: int) -> None:
        self._http = http
        self._url = url
        self._image_token = image_token

    async def prepare(self, parts: Sequence[Part | bytes]) -> Prompt:
        """Of one user message. Two images have text between them: vLLM 0.32 refuses neighbours of
        Gemma 3, whose line breaks become one token."""
        content = [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image_url", "image_url": {"url": data_url(part)}}
            for part in parts
        ]
        return await self.render([{"role": "user", "content": content}])

    async def rendered(self, body: Json) -> Json:
        status, answer = await self._post(RENDER, body)
        if status != 200:
            raise ValueError(f"{RENDER}: {status} {answer}")
        return answer

    async def render(self, messages: list[Json], **more: Any) -> Prompt:
        answer = await self.rendered({"model": MODEL, "messages": messages, **more})
        features = answer["features"] or {"mm_hashes": {"image": []}}
        ids = answer["token_ids"]
        data = (features.get("kwargs_data") or {}).get("image", [])
        return Prompt(ids, self.spans(ids), features["mm_hashes"]["image"], data)

    async def sample(
        self, ids: Sequence[int], *, tokens: int = 6, score_prompt: bool = False, **more: Any
    ) -> Sampled:
        """`score_prompt`: with log-probabilities of the prompt, for which nothing is cached."""
        sampling = {"max_tokens": tokens, "temperature": 0.0, "logprobs": 1}
        sampling |= {"prompt_logprobs": 0} if score_prompt else {}
        body = {"model": MODEL, "token_ids": list(ids), "sampling_params": sampling}
        return Sampled(*await self._post(GENERATE, {**body, "return_token_ids": True, **more}))

    async def is_alive(self) -> bool:
        try:
            async with self._http.get(self._url + "/health", timeout=TIMEOUT) as response:
                return response.status == 200
        except aiohttp.ClientConnectionError:
            return False

    def spans(self, ids: Sequence[int]) -> list[Json]:
        spans: list[Json] = []
        for at, token in enumerate(ids):
            if token != self._image_token:
                continue
            if spans and _end(spans[-1]) == at:
                spans[-1]["length"] += 1
            else:
                spans.append({"offset": at, "length": 1})
        return spans

    async def _post(self, path: str, body: Json) -> tuple[int, Json]:
        """On a connection of its own, because vLLM closes one after some errors."""
        async with self._http.post(
            self._url + path, json=body, timeout=TIMEOUT, headers={"Connection": "close"}
        ) as response:
            return response.status, await response.json()


def data_url(image: Image.Image | bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(encoded(image)).decode()


def encoded(image: Image.Image | bytes, kind: str = "PNG", **more: Any) -> bytes:
    if isinstance(image, bytes):
        return image
    file = io.BytesIO()
    image.save(file, kind, **more)
    return file.getvalue()


def noise(seed: int, width: int = 96, height: int = 64) -> Image.Image:
    random = np.random.default_rng(seed)
    return Image.fromarray(random.integers(0, 255, (height, width, 3), dtype=np.uint8))


def _end(span: Json) -> int:
    return int(span["offset"] + span["length"])
