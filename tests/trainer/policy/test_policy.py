"""Scores and gradients of the policy compared with transformers, one sequence at a time."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM

from tests.trainer.rollouts import group
from trainer.algorithms.token_loss import LossFunction, TokenLoss
from trainer.batch import Batch, build_batch
from trainer.errors import ConfigError, TrainingError
from trainer.optimizer import Stepper
from trainer.optimizer_config import OptimizerConfig
from trainer.policy import scorer
from trainer.policy.model_config import LoraSettings, ModelConfig
from trainer.policy.policy import Policy
from trainer.run.state_folder import read_state, write_state


def make_batch(seed: int, segments: int = 6) -> Batch:
    rng = np.random.default_rng(seed)
    return build_batch([group(rng, f"task{i}", segments=segments) for i in range(2)])


def make_policy(checkpoint: Path, **changes: object) -> Policy:
    config = ModelConfig.model_validate(
        {"path": checkpoint, "max_micro_batch_tokens": 96} | changes
    )
    return Policy(config, OptimizerConfig(lr=1e-3))


def plain_logprobs(
    checkpoint: Path, batch: Batch, temperature: float
) -> tuple[torch.nn.Module, Tensor]:
    """The log-probabilities of transformers' own forward pass, for each sequence alone."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager")
    rows = []
    for index, ids in enumerate(batch.sequences):
        logits = model(torch.as_tensor(ids.astype(np.int64))[None]).logits[0] / temperature
        here = batch.sequence == index
        at = log_softmax(logits, -1)[batch.position[here] - 1]
        rows.append(at.gather(-1, batch.ids[here][:, None])[:, 0])
    return model, torch.cat(rows)


def weighted_sum(batch: Batch) -> LossFunction:
    weights = torch.linspace(-1, 1, batch.num_tokens)
    return lambda logp, _entropy, targets: TokenLoss(logp * weights[targets], {})


def backward(policy: Policy, batch: Batch, loss: LossFunction, temperature: float = 1.0) -> None:
    for micro in policy.pack(batch):
        policy.forward_backward(micro, batch, loss, temperature=temperature)


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("share", [False, True], ids=["packed", "tree"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_those_of_each_sequence_alone(
    checkpoint: Path, temperature: float, share: bool
) -> None:
    batch = make_batch(1)
    expected = plain_logprobs(checkpoint, batch, temperature)[1]
    scores = make_policy(checkpoint, share_prefixes=share).compute_logprobs(
        batch, temperature=temperature
    )
    torch.testing.assert_close(scores.logprobs, expected.detach(), atol=2e-5, rtol=0)


def test_wrong_temperature_or_position_changes_the_logprobs(checkpoint: Path) -> None:
    batch, policy = make_batch(1), make_policy(checkpoint)
    expected = policy.compute_logprobs(batch, temperature=1.0).logprobs

    def mismatch(temperature: float = 1.0, shift: int = 0) -> float:
        micros = policy.pack(batch)
        for micro in micros:
            micro.positions.add_(shift * torch.arange(len(micro.positions)))
        policy.pack = lambda *_: micros  # type: ignore[method-assign]
        got = policy.compute_logprobs(batch, temperature=temperature).logprobs
        del policy.pack
        return float((got - expected).abs().mean())

    assert mismatch() < 1e-6
    assert mismatch(temperature=1.02) > 1e-3
    assert mismatch(shift=1) > 1e-3
    batch.position += (batch.position + 1 < 4).long()
    assert mismatch() > 1e-3


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**20), segments=st.integers(1, 9))
def test_gradients_of_shared_prefixes_equal_those_of_each_sequence_alone(
    checkpoint: Path, seed: int, segments: int
) -> None:
    batch = make_batch(seed, segments)
    model, logprobs = plain_logprobs(checkpoint, batch, 0.8)
    loss = weighted_sum(batch)
    loss(logprobs, logprobs, torch.arange(batch.num_tokens)).losses.sum().backward()
    expected = gradients(model)
    for share in (False, True):
        policy = make_policy(checkpoint, share_prefixes=share)
        backward(policy, batch, loss, 0.8)
        got = gradients(policy.model)
        assert got.keys() == expected.keys()
        for name, gradient in got.items():
            torch.testing.assert_close(gradient, expected[name], atol=1e-3, rtol=1e-3, msg=name)


def test_gradient_does_not_depend_on_the_cut_into_micro_batches(checkpoint: Path) -> None:
    batch, grads = make_batch(3), []
    for budget in (40, 4096):
        policy = make_policy(checkpoint, max_micro_batch_tokens=budget)
        backward(policy, batch, weighted_sum(batch))
        grads.append(gradients(policy.model))
    for name, gradient in grads[0].items():
        torch.testing.assert_close(gradient, grads[1][name], atol=1e-4, rtol=1e-4, msg=name)


@pytest.mark.parametrize("key", ["gradient_checkpointing", "activation_offload"])
def test_what_is_kept_for_the_backward_pass_does_not_change_gradients(
    checkpoint: Path, key: str
) -> None:
    batch, grads = make_batch(4), []
    for on in (False, True):
        policy = make_policy(checkpoint, **{key: on})
        backward(policy, batch, weighted_sum(batch))
        grads.append(gradients(policy.model))
    for name, gradient in grads[0].items():
        torch.testing.assert_close(gradient, grads[1][name])


def test_offloaded_activations_are_the_inputs_of_all_layers(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[Tensor] = []

    def save_on_cpu(*, pin_memory: bool) -> saved_tensors_hooks:
        def keep(tensor: Tensor) -> Tensor:
            moved.append(tensor)
            return tensor

        return saved_tensors_hooks(keep, lambda each: each)

    monkeypatch.setattr(scorer, "save_on_cpu", save_on_cpu)
    batch = make_batch(4)
    policy = make_policy(checkpoint, activation_offload=True, max_micro_batch_tokens=4096)
    (micro,) = policy.pack(batch)
    policy.forward_backward(micro, batch, weighted_sum(batch), temperature=1.0)
    config = policy.model.config
    shape = (1, len(micro.ids), config.hidden_size)
    inputs = {each.data_ptr() for each in moved if each.shape == shape}
    assert config.num_hidden_layers <= len(inputs) <= config.num_hidden_layers + 2
    weights = {weight.data_ptr() for weight in policy.model.get_decoder().layers.parameters()}
    assert not weights & {each.data_ptr() for each in moved}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"weights_dtype": "bfloat16", "compute_dtype": "float32"},
            "needs compute_dtype=bfloat16",
        ),
        ({"activation_offload": True, "gradient_checkpointing": False}, "leave that key out"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(
    checkpoint: Path, keys: dict[str, object], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        make_policy(checkpoint, **keys)


def test_weights_in_bfloat16_are_rounded_and_scored_alike(checkpoint: Path) -> None:
    batch = make_batch(5)
    low = {"compute_dtype": "bfloat16"}
    full = make_policy(checkpoint, **low)
    half = make_policy(checkpoint, **low, weights_dtype="bfloat16")
    for (name, weight), (_, exact) in zip(
        half.named_hf_parameters(), full.named_hf_parameters(), strict=True
    ):
        assert torch.equal(weight, exact.bfloat16()), name
    scores = [each.compute_logprobs(batch, temperature=1.0).logprobs for each in (full, half)]
    assert float((scores[0] - scores[1]).abs().mean()) < 5e-2
    backward(half, batch, weighted_sum(batch))
    assert {gradient.dtype for gradient in gradients(half.model).values()} == {torch.bfloat16}
    half.step()
    moments = half.stepper.optimizer.state.values()
    assert {each["exp_avg"].dtype for each in moments} == {torch.float32}


def test_bfloat16_scores_are_close_to_float32(checkpoint: Path) -> None:
    batch = make_batch(5)
    full, half = (
        make_policy(checkpoint, compute_dtype=dtype).compute_logprobs(batch, temperature=1.0)
        for dtype in ("float32", "bfloat16")
    )
    assert 0 < float((full.logprobs - half.logprobs).abs().mean()) < 5e-2


def assert_described(policy: Policy, named: dict[str, Tensor]) -> None:
    """The shapes that are announced to engines are those of the weights that follow, in order."""
    announced = [(name, each.dtype, each.shape) for name, each in policy.hf_shapes()]
    assert announced == [(name, each.dtype, each.shape) for name, each in named.items()]
    assert all(each.is_meta for _, each in policy.hf_shapes())


def test_exported_parameters_equal_the_checkpoint(checkpoint: Path) -> None:
    """Tied weights occur once and adapters are merged: a new LoRA policy exports the weights of its
    base."""
    saved = load_file(checkpoint / "model.safetensors")
    for lora in (None, LoraSettings(rank=2)):
        policy = make_policy(checkpoint, lora=lora)
        named = dict(policy.named_hf_parameters())
        assert named.keys() == saved.keys()
        assert_described(policy, named)
        for name, weight in named.items():
            torch.testing.assert_close(weight, saved[name], msg=name)


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=2)])
def test_announced_types_are_those_of_the_weights_in_bfloat16(
    checkpoint: Path, lora: LoraSettings | None
) -> None:
    """Merged with adapters in float32, a weight is sent in float32."""
    policy = make_policy(checkpoint, compute_dtype="bfloat16", weights_dtype="bfloat16", lora=lora)
    named = dict(policy.named_hf_parameters())
    assert_described(policy, named)
    types = {torch.bfloat16} if lora is None else {torch.bfloat16, torch.float32}
    assert {each.dtype for each in named.values()} == types


def test_merged_adapters_score_like_the_adapted_model(checkpoint: Path, tmp_path: Path) -> None:
    batch = make_batch(6)
    policy = make_policy(checkpoint, lora=LoraSettings(rank=2))
    reference = policy.compute_logprobs(batch, temperature=1.0).logprobs
    backward(policy, batch, weighted_sum(batch))
    for group_ in policy.stepper.optimizer.param_groups:
        group_["lr"] = 0.3
    policy.step()
    adapted = policy.compute_logprobs(batch, temperature=1.0).logprobs
    assert float((adapted - reference).abs().mean()) > 1e-2
    with policy.adapters_off():
        off = policy.compute_logprobs(batch, temperature=1.0).logprobs
    torch.testing.assert_close(off, reference)
    merged = AutoModelForCausalLM.from_pretrained(checkpoint)
    merged.load_state_dict(dict(policy.named_hf_parameters()), strict=False)
    merged.save_pretrained(tmp_path)
    got = make_policy(tmp_path).compute_logprobs(batch, temperature=1.0).logprobs
    torch.testing.assert_close(got, adapted, atol=1e-4, rtol=0)


def test_error_for_a_loss_that_is_not_finite_names_rollout_and_turn(checkpoint: Path) -> None:
    batch, policy = make_batch(7), make_policy(checkpoint)
    batch.logprobs[3] = torch.nan
    name = batch.name(3)
    with pytest.raises(TrainingError, match=f"{name}: the loss of a token is nan"):
        backward(
            policy,
            batch,
            lambda logp, _e, targets: TokenLoss(logp - batch.logprobs[targets], {}),
        )


def test_sequence_longer_than_the_context_is_refused(checkpoint: Path) -> None:
    batch = make_batch(8)
    batch.sequences = (np.zeros(300, np.int32), *batch.sequences[1:])
    with pytest.raises(TrainingError, match=r"task0-0: a sequence of 300 .* context of 256"):
        make_policy(checkpoint).pack(batch)


def test_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.path: .* holds no config.json"):
        make_policy(tmp_path)


def test_token_outside_the_vocabulary_is_refused(checkpoint: Path) -> None:
    batch = make_batch(9)
    batch.sequences[2][1] = 96
    name = batch.trial_ids[int(batch.sequence_rollout[2])]
    with pytest.raises(TrainingError, match=rf"rollout {name}: token 96 .* vocabulary of 96"):
        make_policy(checkpoint).pack(batch)


def test_tokenizer_with_more_tokens_than_the_model_is_refused(
    checkpoint: Path, tmp_path: Path
) -> None:
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    words = {f"w{i}": i for i in range(97)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="its tokenizer has 97 tokens, but its model only 96"):
        make_policy(tmp_path)


def test_eight_bit_optimizer_without_its_package_is_refused(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(ConfigError, match="adamw_8bit needs the package bitsandbytes"):
        Policy(ModelConfig(path=checkpoint), OptimizerConfig(name="adamw_8bit"))


def test_eight_bit_optimizer_steps_like_the_full_one_and_can_be_saved(
    checkpoint: Path, tmp_path: Path
) -> None:
    batch = make_batch(11)
    weights = []
    for name in ("adamw", "adamw_8bit"):
        policy = Policy(ModelConfig(path=checkpoint), OptimizerConfig(name=name, lr=1e-3))
        for _ in range(3):
            backward(policy, batch, weighted_sum(batch))
            policy.step()
        weights.append(torch.cat([w.flatten() for _, w in policy.named_hf_parameters()]))
    start = torch.cat([w.flatten() for _, w in make_policy(checkpoint).named_hf_parameters()])
    full, eight_bit = ((each - start).detach() for each in weights)
    assert float(torch.cosine_similarity(full, eight_bit, dim=0)) > 0.95
    again = Policy(ModelConfig(path=checkpoint), OptimizerConfig(name="adamw_8bit", lr=1e-3))
    write_state(policy.state_dict(), tmp_path / "state")
    state = again.state_dict()
    read_state(state, tmp_path / "state")
    again.load_state_dict(state)
    for each in (policy, again):
        backward(each, batch, weighted_sum(batch))
        each.step()
    for (_, ours), (_, theirs) in zip(
        policy.named_hf_parameters(), again.named_hf_parameters(), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_schedules_warm_up_and_decay(checkpoint: Path) -> None:
    def rates(**changes: object) -> list[float]:
        config = OptimizerConfig.model_validate({"lr": 1.0, "warmup_steps": 2} | changes)
        stepper = Stepper(torch.nn.Linear(2, 2), config, total_steps=7)
        return [stepper.step()["lr"] for _ in range(7)]

    assert rates() == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1, 1])
    linear = rates(schedule="linear", min_lr_ratio=0.2)
    assert linear == pytest.approx([1 / 3, 2 / 3, 1, 0.8, 0.6, 0.4, 0.2])
    cosine = rates(schedule="cosine")
    assert cosine[2] == 1
    assert cosine[4] == pytest.approx(0.5)
    assert cosine[6] == pytest.approx(0)


@pytest.mark.parametrize("alpha", [4.0, 8.0])
def test_lora_alpha_over_rank_scales_what_the_adapters_add(checkpoint: Path, alpha: float) -> None:
    lora = LoraSettings(rank=2, alpha=alpha, target_modules=("q_proj",))
    policy = make_policy(checkpoint, lora=lora)
    adapted = {n: p for n, p in policy.model.named_parameters() if p.requires_grad}
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in adapted} == {"q_proj"}
    before = {name: weight.clone() for name, weight in policy.named_hf_parameters()}
    with torch.no_grad():
        for weight in adapted.values():
            weight.fill_(0.1)
    for name, weight in policy.named_hf_parameters():
        added = alpha / 2 * 2 * 0.1 * 0.1 if "q_proj" in name else 0.0  # rank 2
        torch.testing.assert_close(weight, before[name] + added, msg=name)
