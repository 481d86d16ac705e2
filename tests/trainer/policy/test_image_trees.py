"""Rows, trees and trees in pieces with images are computed as the model computes each path.

Everything is the trainer's own: batch, micro-batches, policy, loss. Only the image processor is a
stand-in, because transformers' own needs torchvision (`test_processor.py` has the real one).
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForImageTextToText,
    Qwen3_5Config,
    Qwen3VLConfig,
)

from agent_loop.records import Group, Rollout, RolloutStatus, Segment, Task
from proxy.engines.images import GRID
from proxy.records import ImageSpan
from proxy.records.images import image_ids
from tests.trainer.policy.float64 import in_float64
from trainer.algorithms.token_loss import TokenLoss
from trainer.batch import Batch, build_batch
from trainer.errors import ConfigError, TrainingError
from trainer.extras.images.pixels import PIXELS, Pixels, item_digest
from trainer.optimizer_config import OptimizerConfig
from trainer.policy.critic import Critic
from trainer.policy.image_reader import reader_of
from trainer.policy.memory import rank_memory
from trainer.policy.model_config import ModelConfig
from trainer.policy.policy import Policy
from trainer.policy.proof_on_copy import randomize

KINDS = ("qwen3_vl", "qwen3_5")
IMAGE = 500
TEXT = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
TOWER = {
    "depth": 3,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 2,
    "num_position_embeddings": 64,
    "out_hidden_size": 64,
}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_interleaved": True}
IDS = {
    "image_token_id": IMAGE,
    "vision_start_token_id": 501,
    "vision_end_token_id": 502,
    "video_token_id": 503,
}


def settings_of(kind: str) -> Any:
    if kind == "qwen3_vl":
        rope = {**ROPE, "mrope_section": [6, 5, 5]}
        text = {**TEXT, "num_hidden_layers": 3, "rope_parameters": rope}
        tower = {**TOWER, "deepstack_visual_indexes": [0, 1]}
        return Qwen3VLConfig(text_config=text, vision_config=tower, **IDS)
    text = {
        **TEXT,
        "num_hidden_layers": 4,
        "layer_types": [*["linear_attention"] * 3, "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "rope_parameters": {**ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25},
    }
    return Qwen3_5Config(text_config=text, vision_config=TOWER, **IDS)


class StandIn:
    """Pixels of an image whose bytes are `rows columns seed`, in patches; four are one token."""

    def __init__(self, _path: Path) -> None:
        self.made = 0

    def pixels(self, data: bytes) -> Pixels:
        self.made += 1
        try:
            rows, columns, seed = map(int, data.split())
        except ValueError as error:
            raise TrainingError(f"the bytes are not an image: {error}") from error
        random = torch.Generator().manual_seed(seed)
        values = torch.randn(rows * columns, 3 * 2 * 16 * 16, generator=random)
        grid = torch.tensor([1, rows, columns])
        return Pixels(values, grid, item_digest({PIXELS: values, GRID: grid}))


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.extras.images.qwen.Processor", StandIn)


def picture(rows: int, columns: int, seed: int) -> bytes:
    return f"{rows} {columns} {seed}".encode()


PICTURES = (picture(4, 6, 1), picture(8, 4, 2), picture(4, 4, 3))


class Written:
    """A path that is written part by part."""

    def __init__(self, seed: int = 0) -> None:
        self.ids: list[int] = []
        self.images: list[ImageSpan] = []
        self.data: dict[str, bytes] = {}
        self.random = np.random.default_rng(seed)

    def text(self, count: int) -> Written:
        self.ids += self.random.integers(1, 490, count).tolist()
        return self

    def image(self, data: bytes) -> Written:
        pixels = StandIn(Path()).pixels(data)
        sha256, grid = hashlib.sha256(data).hexdigest(), tuple(pixels.grid.tolist())
        tokens = int(pixels.grid.prod()) // 4
        span = ImageSpan(len(self.ids), tokens, IMAGE, pixels.digest, sha256, grid)
        self.images.append(span)
        self.data[sha256] = data
        self.ids += image_ids(pixels.digest, tokens).tolist()
        return self

    def fork(self, seed: int) -> Written:
        other = type(self)(seed)
        other.ids, other.images = [*self.ids], [*self.images]
        other.data = dict(self.data)
        return other

    def segment(self, sampled: int) -> Segment:
        ids = np.array(self.ids, np.int32)
        mask = (np.arange(len(ids)) >= sampled) & (ids >= 0)
        zeros = np.zeros(len(ids), np.int32)
        return Segment(
            -1, ids, mask, zeros.astype(np.float32), zeros, zeros, images=tuple(self.images)
        )


def tree(kind: type[Written] = Written) -> list[Written]:
    """Five paths; three begin with the same image, and two of them have a second one in common.
    Two differ in nothing but which image of one size they have."""
    begin = kind().text(7).image(PICTURES[0]).text(5)
    second = begin.fork(1).text(3).image(PICTURES[1]).text(8)
    return [
        begin.fork(2).text(6),
        second.fork(3).text(4),
        second.fork(4).image(PICTURES[2]).text(5),
        kind(5).text(3).image(PICTURES[2]).text(6),
        kind(5).text(3).image(picture(4, 4, 4)).text(6),
    ]


def batch_of(paths: list[Written]) -> Batch:
    task = Task("images", {})
    rollouts = [
        Rollout(
            f"path {n}",
            task,
            RolloutStatus.DONE,
            0.0,
            segments=(path.segment(2),),
            pictures=path.data,
        )
        for n, path in enumerate(paths)
    ]
    return build_batch([Group("images", task, rollouts)])


@pytest.fixture(scope="module", params=KINDS)
def model_path(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Path:
    path: Path = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    with in_float64(), torch.no_grad():
        model = AutoModelForImageTextToText.from_config(settings_of(request.param))
        randomize(model)
        model.save_pretrained(path)
    return path


def of_qwen(ids: Tensor, made: Sequence[Pixels]) -> dict[str, Tensor]:
    return {
        "image_grid_thw": torch.stack([each.grid for each in made]),
        "mm_token_type_ids": (ids == IMAGE).int(),
    }


def own_code(
    path: Path,
    batch: Batch,
    weights: Tensor,
    pixels: Callable[[bytes], Pixels] | None = None,
    inputs: Callable[[Tensor, Sequence[Pixels]], dict[str, Tensor]] = of_qwen,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities and gradients by the model's own code, each path alone. `inputs`: what it
    gets besides ids and pixels."""
    pixels = pixels or StandIn(path).pixels
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    scores = []
    for index, sequence in enumerate(batch.sequences):
        ids, images = torch.tensor(sequence.astype(np.int64))[None], batch.images_of(index)
        made = [pixels(batch.pictures[image.sha256]) for image in images]
        ids[ids < 0] = IMAGE
        logits = model(
            input_ids=ids,
            pixel_values=torch.cat([each.values for each in made]),
            **inputs(ids, made),
        ).logits[0]
        at = batch.position[batch.sequence == index]
        rows = logits.log_softmax(-1)[at - 1]
        scores.append(rows.gather(1, ids[0][at][:, None])[:, 0])
    logprobs = torch.cat(scores)
    (logprobs * weights).sum().backward()
    named = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return logprobs.detach(), named


def policy_of(path: Path, **model: Any) -> Policy:
    config = ModelConfig(path=path, compute_dtype="float32", **{"vision": "trained", **model})
    return Policy(config, OptimizerConfig(lr=1e-3))


def gradients(policy: Policy, batch: Batch, weights: Tensor) -> dict[str, Tensor]:
    """By name in the checkpoint. The weights stay as they are."""

    def loss(logprobs: Tensor, _entropy: Tensor, targets: Tensor) -> TokenLoss:
        return TokenLoss(logprobs * weights[targets], {})

    late = policy.accumulate(policy.pack(batch), batch, loss, temperature=1.0)
    found: dict[str, Tensor] = {}
    policy.stepper.step = partial(_kept, policy, found)  # type: ignore[method-assign]
    policy.step(late)
    return found


def _kept(policy: Policy, found: dict[str, Tensor], _late: Any) -> dict[str, float]:
    named = policy.model.named_parameters()
    found.update({name: each.grad.clone() for name, each in named if each.grad is not None})
    return {}


WAYS: dict[str, dict[str, Any]] = {
    "rows": {"share_prefixes": False},
    "small rows": {"share_prefixes": False, "max_micro_batch_tokens": 40},
    "tree": {},
    "pieces": {"max_micro_batch_tokens": 9},
    "pieces, recomputed": {"max_micro_batch_tokens": 9, "gradient_checkpointing": True},
}


def rising(batch: Batch) -> Tensor:
    return torch.linspace(0.5, 1.5, batch.num_tokens)


@pytest.fixture(scope="module")
def own(model_path: Path) -> tuple[Tensor, dict[str, Tensor]]:
    """What the model's own code computes of `tree()`."""
    batch = batch_of(tree())
    with in_float64():
        return own_code(model_path, batch, rising(batch))


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("way", WAYS)
def test_images_are_computed_as_the_models_own_code_does(
    model_path: Path, own: tuple[Tensor, dict[str, Tensor]], way: str
) -> None:
    batch = batch_of(tree())
    weights = rising(batch)
    logprobs, expected = own
    policy = policy_of(model_path, **WAYS[way])
    micros = policy.pack(batch)
    in_pieces = way.startswith("pieces")
    assert any(micro.reads_only for micro in micros) == in_pieces
    if in_pieces:
        assert any(_cuts_an_image(micro) for micro in micros)
    found = policy.compute_logprobs(batch, temperature=1.0).logprobs
    assert (found - logprobs).abs().max() < 1e-9
    got = gradients(policy, batch, weights)
    assert got.keys() == expected.keys()
    assert any("visual" in name for name in got)
    for name, each in expected.items():
        scale = float(each.abs().max())
        torch.testing.assert_close(got[name], each, rtol=1e-9, atol=scale * 1e-9, msg=name)


def _cuts_an_image(micro: Any) -> bool:
    return micro.images is not None and int(micro.images.part[0]) > 0


def test_tower_computes_each_image_once_in_a_batch(model_path: Path) -> None:
    policy, batch = policy_of(model_path, vision="frozen"), batch_of(tree())
    tower, seen = reader(policy).tower, []
    tower.register_forward_hook(lambda *_: seen.append(1))
    policy.compute_logprobs(batch, temperature=1.0)
    gradients(policy, batch, torch.ones(batch.num_tokens))
    (part,) = policy.parts(batch, [0, 1])
    policy.compute_logprobs(part.batch, temperature=1.0)
    assert len(seen) == len(batch.pictures) == 4
    policy.compute_logprobs(
        batch_of([Written(9).text(3).image(picture(4, 4, 9)).text(3)]), temperature=1.0
    )
    policy.compute_logprobs(batch, temperature=1.0)
    assert len(seen) == 9


def reader(policy: Policy) -> Any:
    return reader_of(policy.model)


def test_frozen_tower_is_neither_trained_nor_sent(model_path: Path) -> None:
    batch = batch_of(tree())
    names = {}
    for vision in ("frozen", "trained"):
        policy = policy_of(model_path, vision=vision)
        before = {name: each.clone() for name, each in policy.model.named_parameters()}
        policy.compute_logprobs(batch, temperature=1.0)
        late = policy.accumulate(policy.pack(batch), batch, mean_loss, temperature=1.0)
        policy.step(late)
        changed = {n for n, each in policy.model.named_parameters() if (each != before[n]).any()}
        assert any("visual" in name for name in changed) == (vision == "trained")
        assert any("language_model" in name for name in changed)
        names[vision] = {name for name, _ in policy.named_hf_parameters()}
    with safe_open(model_path / "model.safetensors", framework="pt") as file:
        assert names["trained"] == set(file.keys())
    left = names["trained"] - names["frozen"]
    assert left
    assert all("visual" in name for name in left)
    assert not any("visual" in name for name in names["frozen"])


def mean_loss(logprobs: Tensor, _entropy: Tensor, _targets: Tensor) -> TokenLoss:
    return TokenLoss(-logprobs / len(logprobs), {})


def test_trained_tower_is_computed_again_after_a_step(model_path: Path) -> None:
    """Also after a checkpoint was loaded; the reference keeps the first weights."""
    batch, policy = batch_of(tree()), policy_of(model_path)
    reference = Policy(policy.config)
    before = policy.compute_logprobs(batch, temperature=1.0).logprobs
    state = copy.deepcopy(policy.state_dict())
    policy.step(policy.accumulate(policy.pack(batch), batch, mean_loss, temperature=1.0))
    after = policy.compute_logprobs(batch, temperature=1.0).logprobs
    assert (after - before).abs().max() > 1e-3
    fresh = policy_of(model_path)
    fresh.model.load_state_dict(policy.model.state_dict())
    torch.testing.assert_close(fresh.compute_logprobs(batch, temperature=1.0).logprobs, after)
    policy.load_state_dict(state)
    assert torch.equal(policy.compute_logprobs(batch, temperature=1.0).logprobs, before)
    assert torch.equal(reference.compute_logprobs(batch, temperature=1.0).logprobs, before)


def test_frozen_tower_reads_the_same_images_after_weights_were_loaded(model_path: Path) -> None:
    policy, batch = policy_of(model_path, vision="frozen"), batch_of(tree())
    before = policy.compute_logprobs(batch, temperature=1.0).logprobs
    policy.load_state_dict(copy.deepcopy(policy.state_dict()))
    assert torch.equal(policy.compute_logprobs(batch, temperature=1.0).logprobs, before)


def test_adapters_are_on_the_language_part_only(model_path: Path) -> None:
    policy = policy_of(model_path, vision="frozen", lora={"rank": 2})
    adapted = [name for name, _ in policy.adapter()]
    assert adapted
    assert not any("visual" in name for name in adapted)
    batch = batch_of(tree())
    plain = policy_of(model_path, vision="frozen")
    scores = [each.compute_logprobs(batch, temperature=1.0).logprobs for each in (policy, plain)]
    torch.testing.assert_close(*scores)
    found = gradients(policy, batch, torch.ones(batch.num_tokens))
    assert found
    assert all("lora_" in name for name in found)


def test_critic_reads_images(model_path: Path) -> None:
    config = ModelConfig(path=model_path, compute_dtype="float32", vision="trained")
    critic, batch = Critic(config, OptimizerConfig(lr=1e-2)), batch_of(tree())
    torch.nn.init.normal_(critic.module.head.weight)
    values = critic.compute_values(batch)
    same_size = batch.sequence == 3, batch.sequence == 4
    assert (values[same_size[0]] - values[same_size[1]]).abs().max() > 1e-3


Change = Callable[[Batch], Any]


def _without_bytes(batch: Batch) -> None:
    batch.pictures = dict(list(batch.pictures.items())[1:])


def _other_bytes(batch: Batch) -> None:
    first, *_ = batch.pictures
    batch.pictures = {**batch.pictures, first: picture(4, 6, 77)}


def _swapped_bytes(batch: Batch) -> None:
    names = list(batch.pictures)
    batch.pictures = dict(zip(names, reversed(list(batch.pictures.values())), strict=True))


def _changed(batch: Batch, **fields: Any) -> None:
    first, *rest = batch.images[0]
    span = msgspec.structs.replace(first, **fields)
    batch.images = ((span, *rest), *batch.images[1:])


LOSSES: dict[str, tuple[Change, str]] = {
    "its bytes are missing": (_without_bytes, "path 0: image .*: its bytes are missing"),
    "its bytes are others": (_other_bytes, "path 0: image .*: its bytes are those of another"),
    "its bytes are swapped": (_swapped_bytes, "path 0: image .*: its bytes are those of another"),
    "the batch has no images": (
        lambda b: setattr(b, "images", ()),
        r"path 0: \d+ ids are tokens of",
    ),
    "one sequence has none": (
        lambda b: setattr(b, "images", ((), *b.images[1:])),
        r"path 0: \d+ ids are tokens of images",
    ),
    "images of two sequences are swapped": (
        lambda b: setattr(b, "images", (b.images[3], *b.images[1:3], b.images[0], b.images[4])),
        "path 0: image .* are not at",
    ),
    "it is later": (
        lambda b: _changed(b, offset=8),
        r"path 0: image .*: its \d+ tokens are not at 8",
    ),
    "it is shorter": (lambda b: _changed(b, tokens=5), r"path 0: \d+ ids are .* have 5"),
    "it has other places": (
        lambda b: _changed(b, grid=(1, 6, 4)),
        r"path 0: image .* for patches \(1, 6, 4\), but has \d+ for \(.*\)",
    ),
    "its digest is another's": (
        lambda b: _changed(b, digest="ab" * 32),
        r"path 0: image .*: its \d+ tokens are not at 7",
    ),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_image_that_is_lost_or_changed_in_the_batch_ends_the_step(
    model_path: Path, loss: str
) -> None:
    policy, batch = policy_of(model_path, vision="frozen"), batch_of(tree())
    change, message = LOSSES[loss]
    change(batch)
    with pytest.raises(TrainingError, match=message):
        policy.compute_logprobs(batch, temperature=1.0)


def test_image_that_is_lost_on_the_way_to_a_rank_ends_the_step(model_path: Path) -> None:
    policy, batch = policy_of(model_path, vision="frozen"), batch_of(tree())
    (part,) = policy.parts(batch)
    part.batch.images = ()
    with pytest.raises(TrainingError, match="not of those that the batch has"):
        policy.compute_logprobs(part.batch, temperature=1.0)


def test_pixels_that_the_engine_did_not_have_end_the_step(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, batch = policy_of(model_path, vision="frozen"), batch_of(tree())
    monkeypatch.setattr(torch, "randn", lambda *size, generator: torch.zeros(*size))
    with pytest.raises(TrainingError, match=r"path 0: image .*: the engine had other pixels of it"):
        policy.compute_logprobs(batch, temperature=1.0)


def test_text_model_refuses_a_rollout_with_images(model_path: Path) -> None:
    policy = policy_of(model_path, vision="text")
    with pytest.raises(TrainingError, match=r"rollout path 0: image .* set model.vision=frozen"):
        policy.parts(batch_of(tree()))
    text = batch_of([Written().text(20)])
    expected = policy_of(model_path, vision="frozen").compute_logprobs(text, temperature=1.0)
    scores = policy.compute_logprobs(text, temperature=1.0).logprobs
    torch.testing.assert_close(scores, expected.logprobs)


def test_images_without_text_between_them_are_refused(model_path: Path) -> None:
    policy = policy_of(model_path, vision="frozen")
    path = Written().text(3).image(PICTURES[0]).image(PICTURES[1]).text(4)
    with pytest.raises(TrainingError, match="follows another image without a token between"):
        policy.compute_logprobs(batch_of([path]), temperature=1.0)


def test_sampled_image_tokens_are_refused_in_a_record() -> None:
    segment = Written().text(3).image(PICTURES[0]).text(2).segment(0)
    segment.mask[4] = True
    rollout = Rollout("r", Task("t", {}), RolloutStatus.DONE, 0.0, segments=(segment,))
    with pytest.raises(ValueError, match="rollout r, segment 0: tokens of an image are marked"):
        build_batch([Group("g", rollout.task, [rollout])])


@pytest.mark.parametrize(
    ("kind", "message"),
    [("gemma4", "the tokens of an image see each other"), ("qwen3", "it reads no images")],
)
def test_models_whose_images_are_not_trained_are_refused(
    tmp_path: Path, kind: str, message: str
) -> None:
    CONFIG_MAPPING[kind]().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"model.vision: .*{kind}: {message}"):
        policy_of(tmp_path, vision="frozen")


def test_memory_plan_counts_the_tower(model_path: Path) -> None:
    """On each rank, and with moments and gradients only if it is trained."""
    settings = AutoConfig.from_pretrained(model_path)
    tower = sum(w.numel() for w in policy_of(model_path).model.model.visual.parameters())
    plans = {
        vision: rank_memory(
            settings,
            ModelConfig(path=model_path, compute_dtype="float32", vision=vision),
            OptimizerConfig(),
            frozen_models=1,
        )
        for vision in ("text", "frozen", "trained")
    }
    text, frozen, trained = (plans[each] for each in ("text", "frozen", "trained"))
    assert frozen.weights - text.weights == 2 * 4 * tower == trained.weights - text.weights
    assert (frozen.gradients, frozen.moments) == (text.gradients, text.moments)
    assert trained.gradients - text.gradients == 4 * tower
    assert trained.moments - text.moments == 8 * tower
