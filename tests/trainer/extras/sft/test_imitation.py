"""The loss, the gradient and the step of imitation, compared with transformers and with TRL."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from tests.needs import needs
from tests.trainer.extras.sft.recorded import rendering_of, sample_of, text_turns
from trainer.algorithms import Algorithm, AlgorithmConfig
from trainer.algorithms.aggregation import RolloutMean, TokenMean
from trainer.algorithms.imitation import imitation_loss, imitation_weights
from trainer.batch import Batch
from trainer.extras.sft.demonstrations import demonstration
from trainer.extras.sft.fit import batch_of
from trainer.learning.models import Models
from trainer.learning.steps import imitate
from trainer.optimizer_config import OptimizerConfig
from trainer.policy.model_config import ModelConfig
from trainer.policy.policy import Policy

LR = 0.1
STEP = OptimizerConfig(lr=LR, eps=1.0, max_grad_norm=1e9)
"""With this `eps`, Adam's step is almost proportional to the gradient."""
MISSING = (
    None
    if importlib.util.find_spec("trl")
    else "trl is not installed: python -m benchmarks.install reference"
)


@pytest.fixture(scope="module")
def batch(tiny_model: Path) -> Batch:
    """Three sessions that share their system prompt and tool, of which one has a side call."""
    rendering = rendering_of(tiny_model)
    turns = {name: text_turns(name, number) for number, name in enumerate("abc")}
    (side, *_) = text_turns("c", 77)
    turns["c"].append(replace(side, index=2))
    return batch_of(
        [demonstration(sample_of(name, each), rendering) for name, each in turns.items()]
    )


def labels_of(batch: Batch, sequence: int) -> torch.Tensor:
    """The sequence's ids where they are trained, and -100 elsewhere."""
    labels = torch.full((len(batch.sequences[sequence]),), -100)
    here = batch.sequence == sequence
    labels[batch.position[here]] = batch.ids[here]
    return labels


@pytest.mark.parametrize("share_prefixes", [True, False])
def test_loss_and_gradient_are_those_of_transformers_path_by_path(
    tiny_model: Path, batch: Batch, share_prefixes: bool
) -> None:
    assert len(batch.sequences) == 4
    policy = Policy(ModelConfig(path=tiny_model, share_prefixes=share_prefixes), STEP)
    loss_of_tokens = imitation_loss(imitation_weights(batch, TokenMean()))
    total = sum(
        policy.forward_backward(micro, batch, loss_of_tokens, temperature=1.0)["loss"]
        for micro in policy.pack(batch)
    )
    plain = AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation="eager")
    loss = torch.zeros(())
    for index, ids in enumerate(batch.sequences):
        logits = plain(torch.as_tensor(ids.astype(np.int64))[None]).logits[0, :-1]
        loss = loss + cross_entropy(logits, labels_of(batch, index)[1:], reduction="sum")
    loss = loss / batch.num_tokens
    loss.backward()
    assert total == pytest.approx(loss.item(), abs=1e-5)
    own = dict(policy.model.named_parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(own[name].grad, parameter.grad, atol=1e-5, rtol=0)


def test_rollout_mean_weighs_every_session_the_same(batch: Batch) -> None:
    loss = imitation_loss(imitation_weights(batch, RolloutMean()))
    targets = torch.arange(batch.num_tokens)
    ones = torch.full((batch.num_tokens,), -1.0)
    losses = loss(ones, ones, targets).losses
    sums = torch.zeros(3).index_add(0, batch.rollout, losses)
    torch.testing.assert_close(sums, torch.full((3,), 1 / 3))


@needs(MISSING)
@pytest.mark.filterwarnings("ignore")
def test_one_step_is_that_of_trls_sft_trainer(
    tiny_model: Path, batch: Batch, tmp_path: Path
) -> None:
    from datasets import Dataset
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    policy = Policy(ModelConfig(path=tiny_model), STEP)
    metrics = imitate(Models(policy, Algorithm(AlgorithmConfig())), batch, TokenMean())
    rows = {
        "input_ids": [ids.tolist() for ids in batch.sequences],
        "labels": [labels_of(batch, n).tolist() for n in range(len(batch.sequences))],
    }
    settings = SFTConfig(
        output_dir=str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=LR,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        adam_epsilon=1.0,
        max_grad_norm=1e9,
        weight_decay=0.0,
        max_length=None,
        bf16=False,
        fp16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(tiny_model / "tokenizer.json")),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    trainer = SFTTrainer(
        model, settings, train_dataset=Dataset.from_dict(rows), processing_class=tokenizer
    )
    trainer.train()
    theirs = dict(model.named_parameters())
    before = load_file(tiny_model / "model.safetensors")
    assert metrics["sft/loss"] == pytest.approx(trainer.state.log_history[0]["loss"], abs=1e-4)
    for name, weight in policy.named_hf_parameters():
        torch.testing.assert_close(weight, theirs[name].detach(), atol=1e-6, rtol=0)
        assert (weight - before[name]).abs().max() > 1e-6, name
