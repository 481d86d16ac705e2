"""Makes the model of the example: a tiny `Qwen3VLForConditionalGeneration` that presses buttons.

    PYTHONPATH=.cache/torchvision:. python -m examples.images.make_model --out .cache/images/model

The warm-up shows it screens on which someone presses any of the buttons, until it presses one of
them nearly always: the right one on a third of the screens.
"""

from __future__ import annotations

import argparse
import random
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from tokenizers import AddedToken
from torch import Tensor
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)
from transformers.models.qwen2_vl import Qwen2VLImageProcessor

from examples.images.screens import CELLS, COLOURS, PROMPT, place, screens
from examples.starter_model.checkpoint import save_model
from examples.starter_model.tokenizer import train_tokenizer

WORDS = 320
CONTEXT_TOKENS = 1024
_VISION_WORDS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_WIDTH = 128
_PLACE_TOKENS = 3
"""Tokens of a place: `2,3`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pressed", type=float, default=0.95, help="screens with a button pressed")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    shutil.rmtree(given.out, ignore_errors=True)
    given.out.mkdir(parents=True)
    processor = _processor()
    processor.save_pretrained(given.out)
    torch.manual_seed(given.seed)
    model = _model(processor.tokenizer)
    print(f"{sum(weight.numel() for weight in model.parameters()):,} weights")
    lesson = Lesson(processor, random.Random(given.seed))
    _warm_up(model, lesson, given.pressed)
    ends = processor.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    save_model(model, given.out, end_of_turn=ends[0], padding=ends[1])


class Lesson:
    """Batches of conversations, all of one length."""

    def __init__(self, processor: Any, rng: random.Random) -> None:
        self._processor = processor
        self._rng = rng

    def batch(self, size: int) -> tuple[dict[str, Tensor], Tensor]:
        """What the model gets, and which tokens it is to say, `[size, T]` bool."""
        rows, images = [], []
        for _ in range(size):
            messages: list[dict[str, Any]] = []
            for screen in screens(self._rng.randrange(1 << 40, 1 << 50)):
                images.append(screen.image())
                messages += [
                    {
                        "role": "user",
                        "content": [{"type": "image"}, {"type": "text", "text": PROMPT}],
                    },
                    {"role": "assistant", "content": place(self._rng.choice(screen.cells))},
                ]
            rows.append(self._ids(messages))
        ids = torch.tensor(rows)
        image = self._id("<|image_pad|>")
        inputs = {
            "input_ids": ids,
            **self._processor.image_processor(images=images, return_tensors="pt"),
            "mm_token_type_ids": (ids == image).int(),
        }
        return inputs, self._said(ids)

    def _ids(self, messages: list[dict[str, Any]]) -> list[int]:
        text = self._processor.apply_chat_template(messages, tokenize=False)
        whole = text.replace("<|image_pad|>", "<|image_pad|>" * CELLS**2)
        return list(self._processor.tokenizer(whole, add_special_tokens=False)["input_ids"])

    def _said(self, ids: Tensor) -> Tensor:
        """The place of each answer, and its end."""
        ends = ids == self._id("<|im_end|>")
        ends &= ends.cumsum(1) % 2 == 0  # the second, the fourth, …: of the assistant
        said = ends.clone()
        for before in range(1, _PLACE_TOKENS + 1):
            said[:, :-before] |= ends[:, before:]
        return said

    def _id(self, word: str) -> int:
        return int(self._processor.tokenizer.convert_tokens_to_ids(word))


def _warm_up(model: Any, lesson: Lesson, pressed: float) -> None:
    """Until the mean probability that any button is pressed is `pressed` in the last steps."""
    layers = (model.model.language_model.layers, model.model.visual.blocks)
    matrices = [w for part in layers for w in part.parameters() if w.ndim == 2]
    chosen = {id(weight) for weight in matrices}
    others = [weight for weight in model.parameters() if id(weight) not in chosen]
    optimizers = [
        torch.optim.Muon(matrices, lr=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=0.0, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    known: list[float] = []
    started = time.monotonic()
    while sum(known[-8:]) < 8 * pressed:
        inputs, said = lesson.batch(24)
        logits = model(**inputs).logits[:, :-1]
        wanted = said[:, 1:]
        losses = F.cross_entropy(
            logits[wanted], inputs["input_ids"][:, 1:][wanted], reduction="none"
        )
        loss = losses.mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 3e-3 * min(1.0, (len(known) + 1) / 20)
            optimizer.step()
            optimizer.zero_grad()
        places = losses.detach().view(-1, _PLACE_TOKENS + 1)[:, :-1].sum(1)
        # One of the buttons was pressed by chance.
        known.append(float((-places).exp().mean()) * len(COLOURS))
        if len(known) % 10 == 1:
            seconds = time.monotonic() - started
            said_so_far = f"loss {loss.item():.3f}  pressed {known[-1]:.2f}  {seconds:.0f} s"
            print(f"warm-up {len(known)}  {said_so_far}", flush=True)


def _model(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLForConditionalGeneration:
    names = ("vision_start", "vision_end", "image", "video")
    ids = tokenizer.convert_tokens_to_ids(list(_VISION_WORDS))
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_interleaved": True}
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": _WIDTH,
        "intermediate_size": 3 * _WIDTH,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": CONTEXT_TOKENS,
        "rope_parameters": {**rope, "mrope_section": [6, 5, 5]},
    }
    tower = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 64,
        "out_hidden_size": _WIDTH,
        "deepstack_visual_indexes": [0],
    }
    named = {f"{name}_token_id": value for name, value in zip(names, ids, strict=True)}
    model = Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=False, **named)
    )
    torch.nn.init.normal_(model.model.visual.pos_embed.weight, std=0.5)
    return model


def _processor() -> Qwen3VLProcessor:
    tokens = train_tokenizer([f"{PROMPT} user assistant system"], WORDS)
    words = [AddedToken(word, special=True, normalized=False) for word in _VISION_WORDS]
    tokens.add_special_tokens(words)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=CONTEXT_TOKENS,
    )
    sizes: dict[str, Any] = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
    sizes["size"] = {"shortest_edge": 32 * 32, "longest_edge": 1024 * 1024}
    normal: dict[str, Any] = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return Qwen3VLProcessor(
        Qwen2VLImageProcessor(**sizes, **normal),
        tokenizer,
        Qwen3VLVideoProcessor(**sizes, **normal),
        chat_template=Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8"),
    )


if __name__ == "__main__":
    main()
