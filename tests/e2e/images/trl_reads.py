"""TRL trains one step of a tiny Qwen3-VL on exported sessions with images. Prints JSON.

PYTHONPATH=.cache/torchvision:. python -m tests.e2e.images.trl_reads messages FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForImageTextToText, AutoProcessor
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from tests.e2e.images.checkpoints import MODELS

COLUMNS = {"messages": ["messages", "images"], "dpo": ["prompt", "chosen", "rejected", "images"]}


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    checkpoint = folder / "qwen3_vl"
    MODELS["qwen3_vl"](checkpoint)
    rows = Dataset.from_parquet(str(folder / "rows.parquet"), cache_dir=str(folder / "cache"))
    kinds = {"messages": (SFTTrainer, SFTConfig), "dpo": (DPOTrainer, DPOConfig)}
    trainer_class, config_class = kinds[name]
    trainer = trainer_class(
        model=AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32),
        args=config_class(
            output_dir=str(folder / "out"),
            per_device_train_batch_size=2 if name == "messages" else 1,
            max_steps=1,
            max_length=None,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
        ),
        train_dataset=rows.select_columns(COLUMNS[name]),
        processing_class=AutoProcessor.from_pretrained(checkpoint),
    )
    batch = next(iter(trainer.get_train_dataloader()))
    loss = trainer.train().training_loss
    print(json.dumps({"loss": loss, "images": len(batch["image_grid_thw"])}))


if __name__ == "__main__":
    main()
