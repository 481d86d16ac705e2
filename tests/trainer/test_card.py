"""The trainer's own paths on a GPU, without one: devices of tensors, order of streams, memory.

`card.py` computes on the CPU and fails where tensors of two devices meet, and where something is
used before its stream has finished. Kernels are those of a CPU.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, Qwen3Config

from tests.trainer.card import Allocator, Card, CardTensor, TooEarlyError, WrongDeviceError
from tests.trainer.card import pretended as pretend
from tests.trainer.fake_engine import FakeEngine, serving
from tests.trainer.policy.test_policy import make_batch
from trainer.algorithms import Algorithm, AlgorithmConfig
from trainer.algorithms.token_loss import LossFunction, TokenLoss
from trainer.batch import Batch
from trainer.cluster.device_plan import RESERVED_SHARE
from trainer.errors import TrainingError
from trainer.extras.relay.published_weights import Publisher, described
from trainer.learning.models import FreeCache, Models
from trainer.learning.steps import update_policy
from trainer.optimizer import GradientError, Stepper
from trainer.optimizer_config import OptimizerConfig
from trainer.policy import attention, mask
from trainer.policy.critic import Critic
from trainer.policy.mask import AttentionMask, block_mask
from trainer.policy.memory import rank_memory
from trainer.policy.model_config import DTYPES, LoraSettings, ModelConfig
from trainer.policy.policy import Policy
from trainer.policy.scorer import CausalScorer, use_packed_rows
from trainer.rows.packing import Layout, MicroBatch
from trainer.weight_sync import segment
from trainer.weight_sync.control import EngineControl
from trainer.weight_sync.segment import SegmentReader, SegmentWriter
from trainer.weight_sync.transports import VllmTransport

CARD = "cuda:1"
MIB = 2**20


@pytest.fixture(autouse=True)
def _attention_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In place of FlexAttention's kernel, with its mask, which must be on the card."""

    def attend(
        query: Tensor, key: Tensor, value: Tensor, seen: AttentionMask, scale: float, **more: Any
    ) -> Tensor:
        assert block_mask(seen.layout, seen.window).kv_indices.device == query.device
        return attention.attend(query, key, value, seen, scale, **more)

    monkeypatch.setattr(attention, "flex_attend", attend)
    yield
    mask.block_mask.cache_clear()


@pytest.fixture
def card() -> Iterator[Card]:
    with pretend(2) as card:
        yield card


def trained(
    checkpoint: Path, device: str, optimizer: dict[str, Any], model: dict[str, Any]
) -> Policy:
    given = {"path": checkpoint, "max_micro_batch_tokens": 96, "compile_layers": False}
    config = ModelConfig.model_validate({**given, **model})
    return Policy(config, OptimizerConfig(lr=1e-2, **optimizer), device=device)


def loss(batch: Batch) -> LossFunction:
    """As an algorithm's: the batch is in the machine's memory."""
    weights = torch.linspace(-1, 1, batch.num_tokens)
    return lambda logp, _, targets: TokenLoss(logp * weights[targets].to(logp.device), {})


def steps(policy: Policy, batch: Batch, count: int = 2) -> dict[str, Tensor]:
    """The weights after some steps."""
    for _ in range(count):
        policy.compute_logprobs(batch, temperature=1.0)
        policy.accumulate(policy.pack(batch), batch, loss(batch), temperature=1.0)
        policy.step()
    return {name: tensor.cpu() for name, tensor in policy.named_hf_parameters()}


@pytest.mark.parametrize(
    ("optimizer", "model"),
    [
        ({}, {}),
        ({"offload": True}, {}),
        ({}, {"activation_offload": True}),
        ({}, {"lora": LoraSettings(rank=2)}),
        ({}, {"weights_dtype": "bfloat16"}),
    ],
    ids=["whole", "moments in the host", "activations in the host", "adapter", "bfloat16"],
)
def test_step_on_a_card_is_that_of_a_cpu_and_touches_no_other_card(
    checkpoint: Path, optimizer: dict[str, Any], model: dict[str, Any]
) -> None:
    batch = make_batch(1)
    torch.manual_seed(1)  # of the adapter
    expected = steps(trained(checkpoint, "cpu", optimizer, model), batch)
    with pretend(2) as card:
        torch.manual_seed(1)
        policy = trained(checkpoint, CARD, optimizer, model)
        found = steps(policy, batch)
        assert {str(each.device) for each in policy.model.parameters()} == {CARD}
    assert found.keys() == expected.keys()
    assert not [name for name in found if not torch.equal(found[name], expected[name])]
    assert [bool(each.peak) for each in card.allocators] == [False, True]


ADAMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "float32": ({}, {}),
    "bfloat16": ({}, {"weights_dtype": "bfloat16"}),
    "moments in the host": ({"offload": True}, {}),
}
every_adam = pytest.mark.parametrize(("optimizer", "model"), ADAMS.values(), ids=ADAMS)


@pytest.mark.parametrize(
    ("optimizer", "model"),
    [*ADAMS.values(), ({}, {"gradient_checkpointing": True})],
    ids=[*ADAMS, "recomputed"],
)
def test_host_waits_for_the_card_only_to_read_what_a_step_reports(
    checkpoint: Path, optimizer: dict[str, Any], model: dict[str, Any]
) -> None:
    """Once in an optimizer step: for the metrics of all micro-batches and the gradient's norm,
    after the weights have changed."""
    batch = make_batch(1)
    algorithm = Algorithm(AlgorithmConfig())
    algorithm.compute_advantages(batch)
    with pretend() as card:
        model = {"max_micro_batch_tokens": 48, **model}
        policy = trained(checkpoint, "cuda:0", optimizer, model)
        assert len(policy.pack(batch)) > 1
        policy.compute_logprobs(batch, temperature=1.0)
        card.waits.clear()
        scores = policy.compute_logprobs(batch, temperature=1.0)
        assert len(card.waits) == 1, card.waits
        batch.prox_logprobs = scores.logprobs
        card.waits.clear()
        models = Models(policy, algorithm)
        metrics = update_policy(
            models, batch, temperature=1.0, version=0, generator=torch.Generator()
        )
        assert len(card.waits) == 1, card.waits
    assert metrics["grad_norm"] > 0


def test_mask_is_made_once_for_all_layers_of_a_micro_batch(checkpoint: Path, card: Card) -> None:
    batch, policy = make_batch(1), trained(checkpoint, "cuda:0", {}, {"max_micro_batch_tokens": 48})
    micros = policy.pack(batch)
    mask.block_mask.cache_clear()
    policy.accumulate(micros, batch, loss(batch), temperature=1.0)
    made, layers = mask.block_mask.cache_info(), policy.model.config.num_hidden_layers
    assert layers > 1
    assert (made.misses, made.hits) == (len(micros), (layers - 1) * len(micros))


def test_masks_of_windows_are_made_without_waiting_for_the_card(card: Card) -> None:
    at = torch.arange(300)
    layout = Layout(torch.full_like(at, 300), 300).to(torch.device("cuda:0"))
    card.waits.clear()
    for window in (None, 64):
        block_mask(layout, window)
    assert not card.waits


@every_adam
def test_gradient_that_is_not_finite_changes_nothing_on_a_card(
    checkpoint: Path, optimizer: dict[str, Any], model: dict[str, Any]
) -> None:
    batch = make_batch(1)
    with pretend() as card:
        policy = trained(checkpoint, "cuda:0", optimizer, model)
        policy.accumulate(policy.pack(batch), batch, loss(batch), temperature=1.0)
        policy.step()
        before = {name: tensor.cpu() for name, tensor in policy.named_hf_parameters()}
        policy.accumulate(policy.pack(batch), batch, loss(batch), temperature=1.0)
        next(policy.model.parameters()).grad.fill_(float("inf"))
        card.waits.clear()
        with pytest.raises(GradientError, match="the weights are unchanged"):
            policy.step()
        assert len(card.waits) == 1
        after = {name: tensor.cpu() for name, tensor in policy.named_hf_parameters()}
        counts = {float(each["step"].cpu()) for each in policy.stepper.optimizer.state.values()}
    assert counts == {1.0}
    assert all(torch.equal(before[name], after[name]) for name in before)


@every_adam
def test_loss_that_is_not_finite_changes_nothing_on_a_card(
    checkpoint: Path, optimizer: dict[str, Any], model: dict[str, Any]
) -> None:
    """Also if the gradient is finite; the weights are decided on before the host knows."""
    batch = make_batch(1)
    bad = torch.zeros(batch.num_tokens).index_fill(0, torch.tensor(3), torch.inf)

    def shifted(logp: Tensor, _: Tensor, targets: Tensor) -> TokenLoss:
        return TokenLoss(logp + bad[targets].to(logp.device), {})

    with pretend() as card:
        policy = trained(checkpoint, "cuda:0", optimizer, model)
        before = {name: tensor.cpu() for name, tensor in policy.named_hf_parameters()}
        late = policy.accumulate(policy.pack(batch), batch, shifted, temperature=1.0)
        card.waits.clear()
        with pytest.raises(TrainingError, match=f"{batch.name(3)}: the loss of a token is inf"):
            policy.step(late)
        assert all(each.grad is None for each in policy.model.parameters())
        after = {name: tensor.cpu() for name, tensor in policy.named_hf_parameters()}
        states = policy.stepper.optimizer.state.values()
        assert {float(each["step"].cpu()) for each in states} <= {0.0}
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_critic_waits_for_the_card_once(checkpoint: Path) -> None:
    batch = make_batch(1)
    algorithm = Algorithm(AlgorithmConfig.model_validate({"preset": "ppo"}))
    with pretend() as card:
        config = ModelConfig(path=checkpoint, max_micro_batch_tokens=48)
        critic = Critic(config, OptimizerConfig(lr=1e-2), device="cuda:0")
        batch.values = critic.compute_values(batch)
        batch.prox_logprobs = batch.logprobs
        algorithm.compute_advantages(batch)
        loss, micros = algorithm.value_loss(batch), critic.pack(batch)
        assert len(micros) > 1
        critic.step(critic.accumulate(micros, batch, loss))
        card.waits.clear()
        metrics = critic.step(critic.accumulate(micros, batch, loss))
        assert len(card.waits) == 1, card.waits
    assert metrics["grad_norm"] > 0


def test_tensor_of_another_device_in_a_step_is_an_error(checkpoint: Path, card: Card) -> None:
    batch, policy = make_batch(1), trained(checkpoint, CARD, {}, {})
    weights = torch.linspace(-1, 1, batch.num_tokens)
    with pytest.raises(WrongDeviceError, match="cuda:1 and cpu"):
        policy.accumulate(
            policy.pack(batch),
            batch,
            lambda logp, _, targets: TokenLoss(logp * weights[targets], {}),
            temperature=1.0,
        )


def test_moments_in_the_host_are_complete_when_a_step_returns(checkpoint: Path, card: Card) -> None:
    batch, policy = make_batch(1), trained(checkpoint, CARD, {"offload": True}, {})
    policy.accumulate(policy.pack(batch), batch, loss(batch), temperature=1.0)
    policy.step()
    host = [
        each
        for each in tree_leaves(policy.state_dict()["optimizer"])
        if isinstance(each, Tensor) and not isinstance(each, CardTensor) and each.dim()
    ]
    assert host
    for each in host:
        each.clone()  # as a checkpoint reads it


class NotWaiting(torch.overrides.TorchFunctionMode):
    """Copies as one would who does not wait: to be found."""

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "copy_":
            return func(*args, **{**(kwargs or {}), "non_blocking": True})
        return func(*args, **(kwargs or {}))


def test_shared_memory_gets_the_cards_weights_whole(checkpoint: Path, card: Card) -> None:
    policy = trained(checkpoint, CARD, {}, {})
    weights = steps(policy, make_batch(1), 1)
    with contextlib.closing(SegmentWriter()) as writer:
        written = writer.write(policy.named_hf_parameters())
        assert written.digest == segment.digest(weights.items())
        received = dict(SegmentReader().receive(written))
        assert all(torch.equal(received[name], weights[name]) for name in weights)
        with NotWaiting(), pytest.raises(TooEarlyError, match="still copies"):
            writer.write(policy.named_hf_parameters())


def test_published_files_are_those_of_a_cpu(checkpoint: Path, card: Card, tmp_path: Path) -> None:
    policy = trained(checkpoint, CARD, {}, {})
    weights = steps(policy, make_batch(1), 1)
    shapes = policy.hf_shapes()
    sizes = []
    for name, source in (("card", policy.named_hf_parameters()), ("cpu", iter(weights.items()))):
        at = tmp_path / name
        with contextlib.closing(Publisher(f"file://{at}", "run", at, full_every=1)) as publisher:
            publisher.publish(source, described(shapes, shapes), 1)
        files = sorted(at.rglob("full-*.safetensors"))
        sizes.append([file.read_bytes() for file in files])
    assert sizes[0]
    assert sizes[0] == sizes[1]


class Sends:
    """The trainer's end of NCCL: an operation of the current stream reads the message."""

    def __init__(self, card: Card) -> None:
        self.card, self.disabled, self.sent = card, False, 0
        self.group = SimpleNamespace(store=SimpleNamespace(set=lambda *_: None))

    def broadcast(self, message: CardTensor, src: int, stream: Any = None) -> None:
        now: Any = stream or torch.cuda.current_stream()
        self.card.reads(now, message.on_host, "broadcast")
        now.issued += 1
        self.sent += message.numel()

    def destroy(self) -> None:
        self.disabled = True


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")  # vLLM's own
def test_weights_are_sent_by_nccl_after_the_optimizer_has_finished(
    checkpoint: Path, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.weight_transfer import nccl_engine, packed_tensor

    stream: Any = torch.cuda.Stream
    made = tuple(stream(device=CARD) for _ in range(2))
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda *_: made)
    end = Sends(card)
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda _: end)
    batch, policy = make_batch(1), trained(checkpoint, CARD, {}, {})
    with serving(FakeEngine()) as (_, url):
        transport = VllmTransport(EngineControl([url]), "nccl", torch.device(CARD))
        policy.accumulate(policy.pack(batch), batch, loss(batch), temperature=1.0)
        policy.step()
        transport.stage(policy.named_hf_parameters(), policy.hf_shapes)
        transport.send()
        transport.close()
    assert end.sent == sum(tensor.nbytes for _, tensor in policy.hf_shapes())


SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 768,
    "vocab_size": 16000,
}
TOKENS = 512


@pytest.mark.parametrize(
    ("dtype", "checkpointing", "offload"),
    [("float32", False, False), ("bfloat16", True, False), ("bfloat16", True, True)],
    ids=["float32", "bfloat16 again", "bfloat16, moments in the host"],
)
def test_plan_holds_on_a_card_and_its_cache_can_be_given_back(
    dtype: str, checkpointing: bool, offload: bool
) -> None:
    settings, optimizer = Qwen3Config(**SIZES), OptimizerConfig(lr=1e-6, offload=offload)
    config = ModelConfig.model_validate(
        {
            "path": "unused",
            "max_micro_batch_tokens": TOKENS,
            "compute_dtype": dtype,
            "gradient_checkpointing": checkpointing,
            "compile_layers": False,
        }
    )
    plan = rank_memory(settings, config, optimizer)
    with pretend() as card:
        model: Any = AutoModelForCausalLM.from_config(settings).to("cuda:0")
        use_packed_rows(model)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        scorer = CausalScorer(model.train(), DTYPES[dtype])
        stepper = Stepper(scorer, optimizer, None)
        ids, at = torch.zeros(TOKENS, dtype=torch.int64), torch.arange(TOKENS)
        layout = Layout(torch.full((TOKENS,), TOKENS), TOKENS)
        micro = MicroBatch(ids, at, layout, at, at).to(torch.device("cuda:0"))
        for _ in range(2):
            for _ in range(2):
                scorer(micro, micro.ids, 1.0)[0].sum().backward()
            stepper.step()
        del micro, layout
        policy: Any = SimpleNamespace(device=torch.device("cuda:0"))
        models = Models(policy, Algorithm(AlgorithmConfig()))
        mask.block_mask.cache_clear()
        gc.collect()
        used = card.allocator
        before = used.reserved
        FreeCache().on(models)
    assert 0.7 * plan.total < used.peak <= plan.total
    assert used.reserved_peak <= plan.total
    assert card.calls[-1] == "empty_cache"
    resident = plan.weights if offload else plan.resident
    assert 0.95 * resident < used.allocated <= 1.03 * resident
    # A segment of small tensors, which a larger model's share contains, may be used in part.
    assert used.reserved <= used.allocated * (1 + RESERVED_SHARE) + 2 * MIB < before
    del scorer, stepper, model


def test_allocator_splits_merges_and_returns_segments_that_nothing_uses() -> None:
    allocator = Allocator()
    small, large, larger = (allocator.take(size) for size in (700, 3 * MIB, 11 * MIB))
    assert allocator.allocated == 1024 + 14 * MIB
    assert allocator.reserved == (2 + 20) * MIB  # the larger one is in the rest of a segment
    assert allocator.take(12 * MIB + 1)[0].size == 14 * MIB
    allocator.give(*large)
    assert allocator.take(2 * MIB) == large
    allocator.give(*small)
    allocator.empty_cache()
    assert allocator.reserved == (20 + 14) * MIB
    allocator.give(*large)
    allocator.give(*larger)
    assert len(large[0].blocks) == 1
    allocator.empty_cache()
    assert allocator.reserved == 14 * MIB
