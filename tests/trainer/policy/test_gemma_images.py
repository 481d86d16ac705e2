"""Gemma 3's images, whose tokens see each other, are computed as transformers computes them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, Gemma3Config

from proxy.records import ImageSpan
from proxy.records.images import image_ids
from tests.trainer.policy.float64 import in_float64
from tests.trainer.policy.test_image_trees import (
    IMAGE,
    LOSSES,
    TEXT,
    Written,
    batch_of,
    gradients,
    own_code,
    policy_of,
    reader,
    tree,
)
from trainer.batch import Batch
from trainer.errors import ConfigError, TrainingError
from trainer.extras.images.pixels import PATCHES, PIXELS, Pixels, item_digest
from trainer.optimizer_config import OptimizerConfig
from trainer.policy import attention
from trainer.policy.flex import flex_attend
from trainer.policy.mask import block_mask
from trainer.policy.memory import rank_memory
from trainer.policy.model_config import ModelConfig
from trainer.policy.proof_on_copy import randomize

TOKENS = 16


def settings_of(**text: Any) -> Gemma3Config:
    """A layer with a window, which is shorter than the paths and longer than an image, and one
    without."""
    return Gemma3Config(
        text_config={
            **TEXT,
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 20,
            "query_pre_attn_scalar": 32,
            **text,
        },
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 4,
            "vision_use_head": False,
        },
        mm_tokens_per_image=TOKENS,
        boi_token_index=501,
        eoi_token_index=502,
        image_token_index=IMAGE,
        tie_word_embeddings=True,
    )


class StandIn:
    """Pixels of an image whose bytes are `rows columns seed`, all of one size."""

    def __init__(self, _path: Path) -> None:
        pass

    def pixels(self, data: bytes) -> Pixels:
        random = torch.Generator().manual_seed(int(data.split()[2]))
        values = torch.randn(1, 3, 32, 32, generator=random)
        digest = item_digest({PIXELS: values, PATCHES: torch.tensor(1)})
        return Pixels(values, torch.zeros(0, dtype=torch.int64), digest)


class GemmaWritten(Written):
    def image(self, data: bytes) -> Written:
        digest, sha256 = StandIn(Path()).pixels(data).digest, hashlib.sha256(data).hexdigest()
        self.images.append(ImageSpan(len(self.ids), TOKENS, IMAGE, digest, sha256))
        self.data[sha256] = data
        self.ids += image_ids(digest, TOKENS).tolist()
        return self


def batch() -> Batch:
    return batch_of(tree(GemmaWritten))


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.extras.images.qwen.Processor", StandIn)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: Any) -> Path:
    path: Path = tmp_path_factory.mktemp("gemma3")
    torch.manual_seed(0)
    with in_float64(), torch.no_grad():
        model = AutoModelForImageTextToText.from_config(settings_of())
        randomize(model)
        model.save_pretrained(path)
    return path


def own(path: Path, batch: Batch, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities and gradients by the model's own code, each path alone."""
    return own_code(path, batch, weights, StandIn(path).pixels, of_gemma)


def of_gemma(ids: Tensor, _: Sequence[Pixels]) -> dict[str, Tensor]:
    return {"token_type_ids": (ids == IMAGE).int()}


WAYS: dict[str, dict[str, Any]] = {
    "rows": {"share_prefixes": False},
    "small rows": {"share_prefixes": False, "max_micro_batch_tokens": 40},
    "tree": {},
    "trees that no piece cuts": {"max_micro_batch_tokens": 9},
    "tree, recomputed": {"gradient_checkpointing": True},
}


def rising(given: Batch) -> Tensor:
    return torch.linspace(0.5, 1.5, given.num_tokens)


@pytest.fixture(scope="module")
def alone(model_path: Path) -> tuple[Tensor, dict[str, Tensor]]:
    """What the model's own code computes of `batch()`."""
    given = batch()
    with in_float64():
        return own(model_path, given, rising(given))


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("way", WAYS)
def test_images_are_computed_as_the_models_own_code_does(
    model_path: Path, alone: tuple[Tensor, dict[str, Tensor]], way: str
) -> None:
    given = batch()
    weights = rising(given)
    logprobs, expected = alone
    policy = policy_of(model_path, **WAYS[way])
    assert not any(micro.reads_only for micro in policy.pack(given))
    found = policy.compute_logprobs(given, temperature=1.0).logprobs
    assert (found - logprobs).abs().max() < 1e-9
    got = gradients(policy, given, weights)
    assert got.keys() == expected.keys()
    assert any("vision_tower" in name for name in got)
    assert any("multi_modal_projector" in name for name in got)
    for name, each in expected.items():
        atol = float(each.abs().max()) * 1e-9 + 1e-12  # keys' biases have the gradient 0
        torch.testing.assert_close(got[name], each, rtol=1e-9, atol=atol, msg=name)


@pytest.mark.usefixtures("exact")
def test_images_at_the_ends_of_blocks_are_whole(model_path: Path) -> None:
    """On a CPU, queries are computed in blocks of 128."""
    given = batch_of([with_images(12)])
    expected, _ = own(model_path, given, torch.ones(given.num_tokens))
    policy = policy_of(model_path, vision="frozen")
    found = policy.compute_logprobs(given, temperature=1.0).logprobs
    assert (found - expected).abs().max() < 1e-9


def with_images(count: int) -> Written:
    path: Written = GemmaWritten()
    for number in range(count):
        path = path.text(10).image(b"4 4 %d" % number)
    return path.text(9)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_kernel_for_gpus_computes_the_same(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, given = policy_of(model_path, vision="frozen"), batch()
    expected = policy.compute_logprobs(given, temperature=1.0).logprobs
    monkeypatch.setattr(attention, "attend", flex_attend)
    found = policy.compute_logprobs(given, temperature=1.0).logprobs
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 20, 150])
def test_blocks_of_the_mask_have_all_pairs_of_an_image(model_path: Path, window: Any) -> None:
    """Images that stand across the borders of blocks of 128 tokens."""
    policy = policy_of(model_path, vision="frozen")
    (micro,) = policy.pack(batch_of([with_images(12)]))
    layout, images = micro.layout, micro.layout.images
    assert images is not None
    at = torch.arange(layout.tokens)
    q, k = at[:, None], at[None]
    seen = (k <= q) & (q - k < (window or len(at)))
    seen |= (images[q] >= 0) & (images[q] == images[k])
    mask = block_mask(layout, window)
    dense = mask.to_dense()[0, 0].bool()
    for row, column in seen.nonzero().tolist():
        assert dense[row // 128, column // 128]
    assert mask.mask_mod is not None
    found = mask.mask_mod(torch.tensor(0), torch.tensor(0), q, k)
    assert torch.equal(found, seen)


def test_frozen_tower_is_neither_trained_nor_exported(model_path: Path) -> None:
    policy = policy_of(model_path, vision="frozen")
    assert not any(each.requires_grad for each in reader(policy).tower.parameters())
    names = [name for name, _ in policy.named_hf_parameters()]
    assert names
    assert not any("vision" in name or "multi_modal" in name for name in names)
    trained = [name for name, _ in policy_of(model_path).named_hf_parameters()]
    assert any("vision_tower" in name for name in trained)
    assert any("multi_modal_projector" in name for name in trained)


def test_adapters_are_on_the_language_part_only(model_path: Path) -> None:
    policy = policy_of(model_path, vision="frozen", lora={"rank": 2})
    adapted = [name for name, _ in policy.adapter()]
    assert adapted
    assert not any("vision" in name or "multi_modal" in name for name in adapted)


@pytest.mark.parametrize("loss", LOSSES)
def test_image_that_is_lost_or_changed_in_the_batch_ends_the_step(
    model_path: Path, loss: str
) -> None:
    """Also by another one, which has as many tokens whatever its size."""
    policy, given = policy_of(model_path, vision="frozen"), batch()
    change, message = LOSSES[loss]
    change(given)
    with pytest.raises(TrainingError, match=message):
        policy.compute_logprobs(given, temperature=1.0)


def test_pixels_that_the_engine_did_not_have_end_the_step(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, given = policy_of(model_path, vision="frozen"), batch()
    monkeypatch.setattr(torch, "randn", lambda *size, generator: torch.zeros(*size))
    with pytest.raises(TrainingError, match=r"path 0: image .*: the engine had other pixels of it"):
        policy.compute_logprobs(given, temperature=1.0)


def test_text_model_refuses_a_rollout_with_images(model_path: Path) -> None:
    policy = policy_of(model_path, vision="text")
    with pytest.raises(TrainingError, match=r"rollout path 0: image .* set model.vision=frozen"):
        policy.parts(batch())


def test_window_shorter_than_an_image_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(settings_of(sliding_window=15))
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"sliding_window=15 is shorter than an image \(.*=16\)"):
        policy_of(tmp_path, vision="frozen")


def test_memory_plan_counts_tower_and_projector(model_path: Path) -> None:
    settings = AutoConfig.from_pretrained(model_path)
    tower = sum(each.numel() for each in reader(policy_of(model_path)).tower.parameters())
    text, frozen = (
        rank_memory(
            settings,
            ModelConfig(path=model_path, compute_dtype="float32", vision=vision),
            OptimizerConfig(),
        )
        for vision in ("text", "frozen")
    )
    assert frozen.weights - text.weights == 4 * tower
