"""The contestants. Each makes one training step: forward, backward, clipping and AdamW on a batch.

All use the loss of PPO-clip with π_prox from the same pass, one optimizer step per batch, no
gradient checkpointing, and the same model and dtype. TRL pads every row to the longest prompt and
the longest completion of the batch, shuffles the rows, and trains in micro-batches of 8, as its
trainer does, or of as many as given, or of the largest smaller number that divides the rows.
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trainer.algorithms import Algorithm, AlgorithmConfig
from trainer.algorithms.correction import Correction
from trainer.batch import Batch
from trainer.learning.models import Models
from trainer.learning.steps import update_policy
from trainer.optimizer_config import OptimizerConfig
from trainer.policy.model_config import ModelConfig
from trainer.policy.policy import Policy

Step = Callable[[], float]
"""Makes one step. Returns the gradient norm before clipping, by which contestants are compared."""


def ours(
    path: Path,
    batch: Batch,
    device: str,
    dtype: str,
    *,
    share_prefixes: bool,
    in_pieces: bool,
    micro_batch_tokens: int,
) -> Step:
    """`in_pieces` False: a prefix is shared within a micro-batch only."""
    config = ModelConfig.model_validate(
        {
            "path": path,
            "compute_dtype": dtype,
            "share_prefixes": share_prefixes,
            "max_micro_batch_tokens": micro_batch_tokens,
        }
    )
    policy = Policy(config, OptimizerConfig(lr=1e-6), device=device)
    if not in_pieces:
        policy.model.pieces_problem = "the benchmark compares with it"
    algorithm = Algorithm(
        AlgorithmConfig(
            prox="reuse", correction=Correction(weight=None), aggregation="sequence_mean_token_mean"
        )
    )
    algorithm.compute_advantages(batch)
    models = Models(policy, algorithm)
    generator = torch.Generator().manual_seed(0)

    def step() -> float:
        metrics = update_policy(models, batch, temperature=1.0, version=0, generator=generator)
        return metrics["grad_norm"]

    return step


def trl(path: Path, batch: Batch, device: str, dtype: str, most_rows: int) -> Step:
    """GRPOTrainer's own `training_step` on batches made from ours, without its generation."""
    warnings.simplefilter("ignore")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

    rows = shuffle_sequence_dict(_padded(batch, device))
    count = len(batch.sequences)
    size = next(size for size in range(most_rows, 0, -1) if count % size == 0)
    micros = split_tensor_dict(rows, count // size)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=size,
        gradient_accumulation_steps=len(micros),
        num_generations=count,
        beta=0.0,
        loss_type="grpo",
        gradient_checkpointing=False,
        bf16=dtype == "bfloat16",
        use_cpu=device == "cpu",
        report_to=[],
    )
    trainer: Any = GRPOTrainer(
        model=model,
        args=arguments,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_dict({"prompt": ["x"] * 8}),
        processing_class=_any_tokenizer(),
    )
    trainer._prepare_inputs = lambda inputs: inputs
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = len(micros)
    optimizer = trainer.optimizer

    def step() -> float:
        trainer.model.train()
        for number, micro in enumerate(micros, 1):
            trainer.training_step(trainer.model, dict(micro), None)
            done = f"{number} of {len(micros)} micro-batches, {time.process_time():.1f} CPU s"
            print(done, file=sys.stderr, flush=True)
        norm = torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(norm)

    return step


def _padded(batch: Batch, device: str) -> dict[str, torch.Tensor]:
    """The batch in the form in which GRPOTrainer's generation returns it: one row per sequence."""
    Algorithm(AlgorithmConfig()).compute_advantages(batch)
    assert batch.advantages is not None
    count = len(batch.sequences)
    own = [batch.sequence == i for i in range(count)]
    first = [int(batch.position[mask][0]) for mask in own]
    prompt = max(first)
    longest = max(len(ids) - start for ids, start in zip(batch.sequences, first, strict=True))
    ids = torch.zeros(count, prompt + longest, dtype=torch.int64)
    seen, trained = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, (sequence, start) in enumerate(zip(batch.sequences, first, strict=True)):
        shift = prompt - start
        ids[row, shift : shift + len(sequence)] = torch.as_tensor(sequence.astype("int64"))
        seen[row, shift : shift + len(sequence)] = 1
        trained[row, batch.position[own[row]] + shift] = 1
    rows = {
        "prompt_ids": ids[:, :prompt],
        "prompt_mask": seen[:, :prompt],
        "completion_ids": ids[:, prompt:],
        "completion_mask": seen[:, prompt:],
        "tool_mask": trained[:, prompt:],
        "advantages": torch.stack([batch.advantages[mask][0] for mask in own]),
    }
    return {name: value.to(device) for name, value in rows.items()}


def _any_tokenizer() -> Any:
    """A tokenizer, which TRL requires although no text is tokenized here."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"x": 0, "<pad>": 1}, unk_token="x"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<pad>")
