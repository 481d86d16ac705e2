"""One model with images on a real vLLM, and the same model by transformers.

    PYTHONPATH=.cache/torchvision:. python -m tests.e2e.images.compare KIND

Prints a JSON object of what was found. KIND is a model of `checkpoints.py`. It runs in a process
of its own, because torchvision must be absent in that of the tests. Gated DeltaNet (`qwen3_5`) is
computed in bfloat16, which is the only type in which vLLM 0.32 has it on a CPU; the others in
float32.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch
from PIL import Image, ImageOps
from renderers import config_from_name, create_renderer
from transformers import AutoModelForImageTextToText, AutoProcessor
from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import decode_mm_kwargs_item

from proxy.engines.address import EngineAddress
from proxy.engines.images import read_prepared, render_request
from proxy.engines.vllm_server import VllmConfig, VllmServer
from proxy.rendering.tokenizer import load_tokenizer
from tests.e2e.images.checkpoints import CONTEXT_TOKENS, MODELS
from tests.e2e.images.engine import MODEL, ImageEngine, Prompt, Sampled, data_url, encoded, noise
from trainer.extras.images.pixels import Processor

BLOCK_TOKENS = 32
EXIF_ORIENTATION = 0x0112
LONG = "what is this " * 250
"""Longer than a block of the cache of Qwen3.5, which has 1,056 tokens."""
RENDERERS = {"qwen3_vl": "qwen3-vl", "qwen3_5": "qwen3.5"}
NO_PIXELS: dict[str, Any] = {"pixel_values": None, "image_grid_thw": None}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "view",
            "description": "Shows a picture.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
]
CONVERSATION: list[Any] = [
    {"role": "system", "content": "You look at pictures."},
    {
        "role": "user",
        "content": [{"type": "image", "image": "first"}, {"type": "text", "text": "And x.png?"}],
    },
    {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "view", "arguments": '{"path": "x.png"}'},
            }
        ],
    },
    {
        "role": "tool",
        "tool_call_id": "call_1",
        "content": [{"type": "text", "text": "Here."}, {"type": "image", "image": "second"}],
    },
]
Images = Sequence[Image.Image]


class Own:
    """The checkpoint, computed by transformers."""

    def __init__(self, kind: str, folder: Path, dtype: torch.dtype) -> None:
        self.kind = kind
        self.processor = AutoProcessor.from_pretrained(folder)
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype)
        self.model = model.eval()
        config = model.config
        self.image_token = getattr(config, "image_token_id", None) or config.image_token_index

    @torch.inference_mode()
    def logprobs(self, ids: Sequence[int], images: Images, *, causal: bool = False) -> np.ndarray:
        """Of all ids but the first. `causal`: the tokens of an image do not see later ones of it,
        as they do in Gemma 3."""
        tokens = torch.tensor([ids])
        inputs = dict(self.processor.image_processor(images=list(images), return_tensors="pt"))
        inputs["pixel_values"] = inputs["pixel_values"].to(self.model.dtype)
        name = "token_type_ids" if self.kind == "gemma3" else "mm_token_type_ids"
        if not causal:
            inputs[name] = (tokens == self.image_token).int()
        logits = self.model(input_ids=tokens, **inputs).logits[0].float()
        rows = logits.log_softmax(-1)[:-1]
        return np.asarray(rows.gather(1, tokens[0][1:, None])[:, 0])

    @torch.inference_mode()
    def logprobs_by_span(self, ids: Sequence[int], image: Image.Image, start: int) -> np.ndarray:
        """As `logprobs` with one image, whose tokens begin at `start`; all other image tokens are
        text. For Qwen's models."""
        inner, tokens = self.model.model, torch.tensor(ids)
        inputs = self.processor.image_processor(images=[image], return_tensors="pt")
        pixels = inputs["pixel_values"].to(self.model.dtype)
        features = inner.get_image_features(pixels, inputs["image_grid_thw"])
        rows, columns = (inputs["image_grid_thw"][0][1:] // 2).tolist()
        end = start + rows * columns
        mask = torch.zeros(len(ids), dtype=torch.bool)
        mask[start:end] = True
        embedded = inner.get_input_embeddings()(tokens)
        places = [(at, at, at) for at in range(start)]
        places += [(start, start + y, start + x) for y in range(rows) for x in range(columns)]
        after = start + max(rows, columns)
        places += [(after + at,) * 3 for at in range(len(ids) - end)]
        deep = getattr(features, "deepstack_features", None)
        more = {
            "visual_pos_masks": mask[None],
            "deepstack_visual_embeds": [e[0] for e in deep or ()],
        }
        hidden = inner.language_model(
            inputs_embeds=embedded.masked_scatter(mask[:, None], features.pooler_output[0])[None],
            position_ids=torch.tensor(places).T[:, None],
            use_cache=False,
            **(more if deep else {}),
        ).last_hidden_state[0]
        rows_of_logprobs = self.model.lm_head(hidden).float().log_softmax(-1)[:-1]
        return np.asarray(rows_of_logprobs.gather(1, tokens[1:, None])[:, 0])

    def pixels(self, image: Image.Image) -> torch.Tensor:
        """As the engine gets them: Qwen's tower normalizes them itself."""
        raw = {} if self.kind == "gemma3" else {"do_rescale": False, "do_normalize": False}
        return self.processor.image_processor(images=[image], return_tensors="pt", **raw)[
            "pixel_values"
        ]


async def compare(kind: str, folder: Path) -> dict[str, Any]:
    MODELS[kind](folder)
    dtype = "bfloat16" if kind == "qwen3_5" else "float32"
    own = Own(kind, folder, getattr(torch, dtype))
    args = ("--block-size", str(BLOCK_TOKENS), "--enable-prefix-caching")
    config = VllmConfig(
        max_context_tokens=CONTEXT_TOKENS,
        max_sequences=4,
        nice=1,
        args=(*args, "--enable-prompt-tokens-details"),
        env={"PYTHONPATH": os.environ["PYTHONPATH"]},
    )
    log = folder.parent / "vllm.log"
    server = VllmServer(config, folder, log=log, dtype=dtype, served_model_name=MODEL)
    async with server:
        address = EngineAddress.parse(server.url)
        key = {"Authorization": f"Bearer {address.key}"}
        async with aiohttp.ClientSession(headers=key) as http:
            return await _found(ImageEngine(http, address.url, own.image_token), own, folder)


async def _found(engine: ImageEngine, own: Own, folder: Path) -> dict[str, Any]:
    return {
        "rendering": await _rendering(engine, own.kind, folder),
        "logprobs": await _logprobs(engine, own),
        "pixels": await _pixels(engine, own),
        "same digests": await _same_digests(engine, own, folder),
        "cache": await _cache(engine),
        "turns": await _turns(engine, own),
        "image tokens as text": await _image_tokens_as_text(engine, own),
        "content_parts": await _content_parts(engine),
        "faults": await _faults(engine),
    }


async def _rendering(engine: ImageEngine, kind: str, folder: Path) -> dict[str, bool] | None:
    """Whether the package `renderers`, which gets no more of an image than the number of its
    tokens, makes the engine's ids of the published chat template; None: it does not know it."""
    if kind not in RENDERERS:
        return None
    pictures = {"first": noise(41), "second": noise(42, 300, 40)}
    counts = {
        name: (await engine.prepare([picture, "x"])).spans[0]["length"]
        for name, picture in pictures.items()
    }
    tokenizer = load_tokenizer(folder)
    renderer = create_renderer(tokenizer, config_from_name(RENDERERS[kind]))
    renderer._process_image = lambda part: (None, NO_PIXELS, counts[part["image"]], part["image"])
    full = renderer.render(CONVERSATION, tools=TOOLS, add_generation_prompt=True)
    messages = _with_pictures(CONVERSATION, pictures)
    whole = await engine.render(messages, tools=TOOLS, tool_choice="none")
    begin = renderer.render(CONVERSATION[:2], tools=TOOLS, add_generation_prompt=True)
    given = len(begin.token_ids)
    end = full.token_ids.index(tokenizer.convert_tokens_to_ids("<|im_end|>"), given) + 1
    bridge = partial(
        renderer.bridge_to_next_turn,
        begin.token_ids,
        full.token_ids[given:end],
        CONVERSATION[3:],
        tools=TOOLS,
    )
    next_turn = bridge(previous_multi_modal_data=begin.multi_modal_data)
    return {
        "ids are the engine's": full.token_ids == whole.ids,
        "spans are the engine's": _spans(full) == whole.spans,
        "next turn extends": next_turn.token_ids[:end] == full.token_ids[:end],
        "next turn has all spans": _spans(next_turn) == engine.spans(next_turn.token_ids),
        "also without the earlier ones": _spans(bridge()) == engine.spans(next_turn.token_ids),
    }


def _spans(rendered: Any) -> list[dict[str, int]]:
    return [asdict(each) for each in rendered.multi_modal_data.mm_placeholders["image"]]


def _with_pictures(messages: Any, pictures: dict[str, Image.Image]) -> Any:
    if isinstance(messages, dict) and messages.get("type") == "image":
        return {"type": "image_url", "image_url": {"url": data_url(pictures[messages["image"]])}}
    if isinstance(messages, dict):
        return {key: _with_pictures(value, pictures) for key, value in messages.items()}
    if isinstance(messages, list):
        return [_with_pictures(each, pictures) for each in messages]
    return messages


async def _logprobs(engine: ImageEngine, own: Own) -> dict[str, Any]:
    """Mean |Δ log p| between engine and transformers: as sent, and with other images there."""
    one, two, three = noise(1), noise(2, 64, 96), noise(3, 300, 40)
    prompt = await engine.prepare([one, "and", two, "and", three, "what is this"])
    sampled = await engine.sample(prompt.ids, score_prompt=True, features=prompt.features())
    images = {
        "same": (one, two, three),
        "first changed": (noise(4), two, three),
        "last changed": (one, two, noise(4, 300, 40)),
    }
    found = {name: _difference(sampled, own, given) for name, given in images.items()}
    if own.kind == "gemma3":
        found["causal"] = _difference(sampled, own, images["same"], causal=True)
    text = await engine.prepare(["what is this " * 12])
    by_text = await engine.sample(text.ids, score_prompt=True)
    return {**found, "tokens": len(sampled.all_ids), "text alone": _text_difference(by_text, own)}


def _difference(sampled: Sampled, own: Own, images: Images, **more: bool) -> float:
    return _mean(sampled.logprobs - own.logprobs(sampled.all_ids, images, **more))


def _text_difference(sampled: Sampled, own: Own) -> float:
    tokens = torch.tensor([sampled.all_ids])
    with torch.inference_mode():
        rows = own.model(input_ids=tokens).logits[0].float().log_softmax(-1)[:-1]
    return _mean(sampled.logprobs - rows.gather(1, tokens[0][1:, None])[:, 0].numpy())


def _mean(differences: np.ndarray) -> float:
    return float(np.abs(differences).mean())


def _pictures() -> dict[str, bytes]:
    """Kind of image → such an image."""
    picture = noise(5, 200, 120)
    clear = picture.copy()
    clear.putalpha(Image.fromarray(np.asarray(noise(6, 200, 120))[..., 0]))
    turned = Image.Exif()
    turned[EXIF_ORIENTATION] = 6
    return {
        "RGB": encoded(picture),
        "grey": encoded(picture.convert("L")),
        "palette": encoded(picture.convert("P")),
        "alpha": encoded(clear),
        "turned JPEG": encoded(picture, "JPEG", exif=turned),
        "WebP": encoded(picture, "WEBP", lossless=True),
        "GIF": encoded(picture, "GIF", save_all=True, append_images=[noise(7, 200, 120)]),
    }


async def _pixels(engine: ImageEngine, own: Own) -> dict[str, list[str]]:
    """Kind of image → how Pillow must read it for transformers to make the engine's pixels of it,
    bit for bit."""
    found = {}
    for name, data in _pictures().items():
        prompt = await engine.prepare([data, "what is this"])
        item = decode_mm_kwargs_item(prompt.data[0])
        engines = item["pixel_values"].data
        found[name] = [
            way
            for way, read in WAYS.items()
            if torch.equal(own.pixels(read(data)).reshape(engines.shape), engines)
        ]
    return found


async def _same_digests(engine: ImageEngine, own: Own, folder: Path) -> list[str]:
    """The kinds of images of which the trainer's digest is the proxy's, with the same grid."""
    processor = Processor(folder)
    found = []
    for name, data in _pictures().items():
        answer = await engine.rendered(render_request(MODEL, data, "image/png"))
        prepared = read_prepared(json.dumps(answer).encode(), own.image_token)
        pixels = processor.pixels(data)
        if (prepared.digest, prepared.grid) == (pixels.digest, tuple(pixels.grid.tolist())):
            found.append(name)
    return found


def _as_rgb(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


def _upright_on_white(data: bytes) -> Image.Image:
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image).convert("RGB")


WAYS = {"RGB": _as_rgb, "upright, on white": _upright_on_white}


async def _cache(engine: ImageEngine) -> list[list[Any]]:
    """Image, number of cached tokens, and log-probabilities of the answer, in order."""
    one, two = [await engine.prepare([noise(seed), LONG]) for seed in (1, 2)]
    if one.ids != two.ids:
        raise ValueError("images of one size give different ids")
    found = []
    for name, prompt in (("one", one), ("one", one), ("two", two), ("two", two), ("one", one)):
        sampled = await engine.sample(prompt.ids, features=prompt.features())
        found.append([name, sampled.cached_tokens, sampled.sampled_logprobs])
    return found


async def _turns(engine: ImageEngine, own: Own) -> dict[str, Any]:
    """A second turn with an image extends the ids of the first; the first image is only named."""
    one, two = noise(11), noise(12, 128, 64)
    first = await engine.prepare([one, "what is this"])
    answer = await engine.sample(first.ids, features=first.features(), tokens=12)
    rest = await engine.sample(
        [*first.ids, *answer.ids[:5]], features=first.features(data=None), tokens=7
    )
    second = await engine.prepare([two, "and this"])
    ids = [*first.ids, *answer.ids, *second.ids]
    both = Prompt(ids, engine.spans(ids), first.hashes + second.hashes, first.data + second.data)
    features = both.features(data=[None, second.data[0]])
    sampled = await engine.sample(ids, score_prompt=True, features=features)
    return {
        "rest of an answer is the same": rest.ids == answer.ids[5:],
        "second turn": _difference(sampled, own, (one, two)),
        "second turn, other image": _difference(sampled, own, (one, noise(13, 128, 64))),
    }


async def _image_tokens_as_text(engine: ImageEngine, own: Own) -> float | None:
    """Mean |Δ log p| with image tokens outside every span, as if the model had sampled them."""
    if own.kind == "gemma3":
        return None
    picture = noise(61)
    prompt = await engine.prepare([picture, "what is this"])
    ids = [*prompt.ids, 70, own.image_token, 71, own.image_token, own.image_token, 72]
    sampled = await engine.sample(ids, score_prompt=True, features=prompt.features())
    start = prompt.spans[0]["offset"]
    return _mean(sampled.logprobs - own.logprobs_by_span(sampled.all_ids, picture, start))


async def _content_parts(engine: ImageEngine) -> dict[str, Any]:
    """The other way: the engine itself prepares the images, at each call or by the name `uuid`."""
    picture = noise(21)
    prompt = await engine.prepare([picture, "what is this"])
    expected = await engine.sample(prompt.ids, features=prompt.features())
    ids, url = prompt.collapsed, data_url(picture)
    part = {"type": "image_url", "uuid": "a-name"}
    found: dict[str, Any] = {}
    for name, given in (
        ("with data", {**part, "url": url}),
        ("by its name", part),
        ("by an unknown name", {**part, "uuid": "another"}),
    ):
        sampled = await engine.sample(ids, content_parts=[given])
        found[name] = sampled.status
        if sampled.status == 200:
            same = sampled.answer["prompt_token_ids"] == prompt.ids and sampled.ids == expected.ids
            found[name] = "same" if same else "different"
    many = await engine.sample(prompt.ids, content_parts=[{**part, "url": url}])
    found["expanded ids"] = (
        "more ids" if len(many.answer["prompt_token_ids"]) > len(prompt.ids) else "same"
    )
    return found


async def _faults(engine: ImageEngine) -> dict[str, str]:
    """What the engine does with `features` that are wrong. The last one ends it."""
    one, two = [await engine.prepare([noise(seed), "what is this"]) for seed in (31, 32)]
    right = await engine.sample(one.ids, features=one.features())
    other = await engine.sample(two.ids, features=two.features())
    (span,) = one.spans
    moved = {"offset": span["offset"] + 1, "length": span["length"]}
    short = {"offset": span["offset"], "length": span["length"] - 1}
    long = {"offset": span["offset"], "length": span["length"] + 1}
    given = {
        "no features": None,
        "hash of one, pixels of two": one.features(data=two.data),
        "new hash, pixels of two": one.features(hashes=["new"], data=two.data),
        "one token too late": one.features(hashes=["late"], spans=[moved]),
        "one token too few": one.features(hashes=["few"], spans=[short]),
        "unknown hash without pixels": one.features(hashes=["unknown"], data=None),
        "one token too many": one.features(hashes=["many"], spans=[long]),
    }
    found = {}
    for name, features in given.items():
        sampled = await engine.sample(one.ids, features=features)
        said = str(sampled.status)
        if sampled.status == 200:
            known = {right.sampled_logprobs[0]: "as one", other.sampled_logprobs[0]: "as two"}
            said = known.get(sampled.sampled_logprobs[0], "as neither")
        found[name] = said if await engine.is_alive() else f"{said}, engine ended"
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        print(json.dumps(asyncio.run(compare(sys.argv[1], Path(temporary, "model"))), indent=1))
