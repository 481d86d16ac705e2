"""One training step each: forward, backward, clipping and AdamW on all of a batch's tokens.

All take PPO-clip's loss with π_prox of the same pass, one optimizer step a batch, no gradient
checkpointing, the same model and type. TRL pads to the longest row of a micro-batch of 8.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trainer.algorithms import Algorithm, AlgorithmConfig
from trainer.algorithms.config import Correction
from trainer.batch import Batch
from trainer.model import ModelConfig
from trainer.optimizer import OptimizerConfig
from trainer.policy import Policy
from trainer.update import update_policy

Step = Callable[[], float]
"""Makes one step; its gradient norm before clipping, by which contestants are compared."""


def ours(path: Path, batch: Batch, device: str, dtype: str, *, share_prefixes: bool) -> Step:
    config = ModelConfig.model_validate(
        {
            "path": path,
            "compute_dtype": dtype,
            "share_prefixes": share_prefixes,
            "max_micro_batch_tokens": 32768,
        }
    )
    policy = Policy(config, OptimizerConfig(lr=1e-6), device=device)
    algorithm = Algorithm(
        AlgorithmConfig(
            prox="reuse", correction=Correction(), aggregation="sequence_mean_token_mean"
        )
    )
    algorithm.compute_advantages(batch)
    generator = torch.Generator().manual_seed(0)

    def step() -> float:
        metrics = update_policy(
            policy, algorithm, batch, temperature=1.0, version=0, generator=generator
        )
        return metrics["grad_norm"]

    return step


def trl(path: Path, batch: Batch, device: str, dtype: str) -> Step:
    """GRPOTrainer's own `training_step` on batches made from ours; its generation is left out."""
    warnings.simplefilter("ignore")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    micros = _padded_micro_batches(batch, rows=8, device=device)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=len(micros),
        num_generations=8,
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
        for micro in micros:
            trainer.training_step(trainer.model, micro, None)
        norm = torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(norm)

    return step


def _padded_micro_batches(batch: Batch, rows: int, device: str) -> list[dict[str, Any]]:
    """Rows sorted by length, so that TRL's padding is as small as it can be."""
    algorithm = Algorithm(AlgorithmConfig())
    algorithm.compute_advantages(batch)
    assert batch.advantages is not None
    order = sorted(range(len(batch.sequences)), key=lambda i: len(batch.sequences[i]))
    micros = []
    for start in range(0, len(order), rows):
        chosen = order[start : start + rows]
        first = [int(batch.position[batch.sequence == i][0]) for i in chosen]
        prompt, longest = max(first), 0
        for i, f in zip(chosen, first, strict=True):
            longest = max(longest, len(batch.sequences[i]) - f)
        ids = torch.zeros(len(chosen), prompt + longest, dtype=torch.int64)
        seen, trained = torch.zeros_like(ids), torch.zeros_like(ids)
        advantages = torch.zeros(len(chosen))
        for row, (i, f) in enumerate(zip(chosen, first, strict=True)):
            own = batch.sequence == i
            shift = prompt - f
            end = shift + len(batch.sequences[i])
            ids[row, shift:end] = torch.as_tensor(batch.sequences[i].astype("int64"))
            seen[row, shift:end] = 1
            trained[row, batch.position[own] + shift] = 1
            advantages[row] = batch.advantages[own][0]
        micros.append(
            {
                "prompt_ids": ids[:, :prompt].to(device),
                "prompt_mask": seen[:, :prompt].to(device),
                "completion_ids": ids[:, prompt:].to(device),
                "completion_mask": seen[:, prompt:].to(device),
                "tool_mask": trained[:, prompt:].to(device),
                "advantages": advantages.to(device),
                "num_items_in_batch": torch.tensor(batch.num_tokens, device=device),
            }
        )
    return micros


def _any_tokenizer() -> Any:
    """TRL asks for a tokenizer; no text is tokenized here."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"x": 0, "<pad>": 1}, unk_token="x"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<pad>")
