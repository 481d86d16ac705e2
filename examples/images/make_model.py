"""Makes the model of the example: a tiny `Qwen3VLForConditionalGeneration` that presses buttons.

    export PYTHONPATH=.cache/torchvision:.
    python -m examples.images.make_model --out .cache/images/model
    python -m examples.images.make_model --agent claude-code --out .cache/images/claude_code

For Claude Code, the folders of the tasks are made, too, each with its screen. In the warm-up
someone presses one of the buttons of a screen, so that the model presses one nearly always: the
right one on a third of the screens. See `lessons.py`.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from collections.abc import Sequence
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

from examples.images.lessons import FILE, WARM_UPS, Lesson, Presses, Stage, asked_button
from examples.images.screens import COLOURS, PROMPT, ask, screens
from examples.starter_model.checkpoint import save_model
from examples.starter_model.tokenizer import train_tokenizer

WORDS = 1024
CONTEXT_TOKENS = 1024
BATCH = 16
MOST_ROUNDS = 8
"""Of a stage. Two are usual."""
HELD_OUT = 96
"""Conversations by which a stage ends."""
_VISION_WORDS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_WIDTH = 128
_PLACE_TOKENS = 3
"""Tokens of a place: `2,3`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agent", choices=WARM_UPS, default="openai-sdk")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    shutil.rmtree(given.out, ignore_errors=True)
    given.out.mkdir(parents=True)
    if given.agent == "claude-code":
        for file in Path(__file__).parent.glob("*.jsonl"):
            _draw(file, given.out.with_name(f"{given.out.name}_folders"))
    stages = WARM_UPS[given.agent]
    processor = _processor(stages)
    processor.save_pretrained(given.out)
    torch.manual_seed(given.seed)
    model = _model(processor.tokenizer)
    print(f"{sum(weight.numel() for weight in model.parameters()):,} weights")
    for n, stage in enumerate(stages):
        lesson = Lesson(processor, stage.conversation, given.seed + n)
        for _ in range(MOST_ROUNDS):
            _warm_up(model, lesson, stage)
            if not stage.right or _right(model, lesson) >= stage.right:
                break
        else:
            parser.error(f"{stage.conversation.__name__}: not learned; try another --seed")
    ends = processor.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    save_model(model, given.out, end_of_turn=ends[0], padding=ends[1])


def _warm_up(model: Any, lesson: Lesson, stage: Stage) -> None:
    """The learning rate falls to 0."""
    layers = (model.model.language_model.layers, model.model.visual.blocks)
    matrices = [w for part in layers for w in part.parameters() if w.ndim == 2]
    chosen = {id(weight) for weight in matrices}
    others = [weight for weight in model.parameters() if id(weight) not in chosen]
    optimizers = [
        torch.optim.Muon(matrices, lr=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=0.0, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    name, steps = stage.conversation.__name__, stage.steps
    started = time.monotonic()
    for step in range(1, steps + 1):
        losses = _losses(model, lesson)
        places = losses[:, -_PLACE_TOKENS - 1 :]
        loss = losses.mean() + places.mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = stage.rate * min(1.0, step / 20, 2 * (1 - step / (steps + 1)))
            optimizer.step()
            optimizer.zero_grad()
        if step % 10 == 0 or step == steps:
            likely = float((-places.detach()[:, :-1].sum(1)).exp().mean())  # what was pressed
            seconds = time.monotonic() - started
            said_so_far = f"loss {loss.item():.3f}  likely {likely:.2f}  {seconds:.0f} s"
            print(f"{name} {step}/{steps}  {said_so_far}", flush=True)


@torch.no_grad()
def _right(model: Any, lesson: Lesson) -> float:
    """The likelihood of the buttons that are asked for, on screens that nobody has pressed."""
    batches = [_losses(model, lesson, asked_button) for _ in range(HELD_OUT // BATCH)]
    last = torch.cat(batches)[:, -_PLACE_TOKENS - 1 : -1]
    right = float((-last.sum(1)).exp().mean())
    print(f"right {right:.2f}", flush=True)
    return right


def _losses(model: Any, lesson: Lesson, presses: Presses | None = None) -> Tensor:
    """Of what is said in each conversation of a batch, `[size, tokens]`."""
    inputs, said = lesson.batch(BATCH, presses)
    logits = model(**inputs).logits[:, :-1]
    wanted = said[:, 1:]
    ids = inputs["input_ids"][:, 1:]
    return F.cross_entropy(logits[wanted], ids[wanted], reduction="none").view(len(wanted), -1)


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


def _draw(tasks: Path, folders: Path) -> None:
    """The working directory of each task."""
    for line in tasks.read_text(encoding="utf-8").splitlines():
        task = json.loads(line)
        (folders / task["task_id"]).mkdir(parents=True, exist_ok=True)
        screen = next(screens(task["seed"]))
        (folders / task["task_id"] / FILE).write_bytes(screen.png())


def _processor(stages: Sequence[Stage]) -> Qwen3VLProcessor:
    template = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")
    messages, tools, _ = stages[-1].conversation(random.Random(0))
    contents = (message["content"] for message in messages)
    texts = [each for each in contents if isinstance(each, str)]
    # The vocabulary of the first agent's model is that of docs/notes/images.md's curves.
    asked = [PROMPT] if len(stages) == 1 else map(ask, COLOURS)
    texts += [*asked, template, *(json.dumps(tool) for tool in tools)]
    tokens = train_tokenizer(texts * 2, WORDS)
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
        chat_template=template,
    )


if __name__ == "__main__":
    main()
