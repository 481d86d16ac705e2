"""Writes a checkpoint without weights: a small byte-level BPE tokenizer and a chat template."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

TEMPLATES = Path(__file__).parent / "checkpoints"
QWEN_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
GEMMA_WORDS = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
GEMMA_TEMPLATE = Path(__file__).parents[2] / "examples/images/gemma3.jinja"
IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PICTURES = "pictures.jinja"
_TEXT = (
    "system user assistant tool You may call one or more functions to assist with the user query. "
    'The answer is a sum of two numbers. {"name": "shell", "arguments": {"command": "ls -la"}} '
    "Let me look at the file, then say what it holds. Été naïve 数学 done, thank you. 0123456789 "
)


def write_checkpoint(folder: Path, *, template: str = "qwen3.jinja") -> Path:
    """With the template `PICTURES`, one of a model that reads images, as Qwen3-VL does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT] * 4, trainer)
    special = QWEN_TOKENS[:3]
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False, special=t in special) for t in QWEN_TOKENS]
    )
    reads_images = template == PICTURES
    if reads_images:
        tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in IMAGE_TOKENS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    model: dict[str, int | None] = {"max_position_embeddings": 32768}
    if reads_images:
        model["image_token_id"] = tokenizer.token_to_id("<|image_pad|>")
    (folder / "config.json").write_text(json.dumps(model))
    (folder / "chat_template.jinja").write_text((TEMPLATES / template).read_text())
    return folder


def write_gemma_checkpoint(folder: Path, template: str) -> Path:
    """One of Gemma 3: words and line breaks around an image merge with the text."""
    write_checkpoint(folder, template="plain.jinja")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in GEMMA_WORDS])
    tokenizer.add_tokens([AddedToken("\n" * count, normalized=False) for count in range(1, 5)])
    tokenizer.save(str(folder / "tokenizer.json"))
    start, end, image = map(tokenizer.token_to_id, GEMMA_WORDS)
    model = {
        "model_type": "gemma3",
        "max_position_embeddings": 32768,
        "boi_token_index": start,
        "eoi_token_index": end,
        "image_token_index": image,
    }
    (folder / "config.json").write_text(json.dumps(model))
    (folder / "chat_template.jinja").write_text(template)
    return folder


def gemma_template() -> str:
    """That of examples/images, with the words of these checkpoints."""
    text = GEMMA_TEMPLATE.read_text("utf-8")
    return text.replace("<start_of_turn>", "<|im_start|>").replace("<end_of_turn>", "<|im_end|>")
