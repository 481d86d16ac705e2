"""Rows and trees with images, computed by the trainer's attention: what docs/notes/images.md says.

The decoder gets embeddings in which the features of the images stand, positions in three
dimensions, and the layout of a packed row. The tower computes each image once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, Qwen3_5Config, Qwen3VLConfig

from agent_loop.records import Group, Rollout, RolloutStatus, Segment, Task
from tests.trainer.policy.float64 import in_float64
from trainer.batch import Batch, build_batch
from trainer.policy.proof_on_copy import randomize
from trainer.policy.scorer import use_packed_rows
from trainer.rows.packing import MicroBatch, pack

IMAGE = 500
GRIDS = ((4, 6), (8, 4), (4, 4))
"""Rows and columns of patches of three images; four patches are one token."""
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


class Token(NamedTuple):
    """A token of the tree, of which several paths may have the beginning."""

    id: int
    image: int = -1
    """Index in GRIDS; -1: it is text."""
    part: int = 0
    """Which of the image's tokens it is."""


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


class Tree:
    """Four paths; three begin with the same image, and two of them have a second one in common."""

    def __init__(self) -> None:
        self.tokens: list[Token] = []
        self._random = np.random.default_rng(0)
        begin = [*self._text(7), *self._image(0), *self._text(5)]
        second = [*begin, *self._text(3), *self._image(1), *self._text(8)]
        self.paths = [
            [*begin, *self._text(6)],
            [*second, *self._text(4)],
            [*second, *self._image(2), *self._text(5)],
            [*self._text(3), *self._image(2), *self._text(6)],
        ]

    def batch(self) -> Batch:
        """Its ids are indices in `tokens`, so that only what is one token of the tree is shared."""
        task = Task("images", {})
        rollouts = []
        for number, path in enumerate(self.paths):
            none = np.zeros(len(path), np.int32)
            ids, trained = np.array(path, np.int32), np.arange(len(path)) > 0
            segment = Segment(-1, ids, trained, none.astype(np.float32), none, none)
            rollouts.append(
                Rollout(f"path {number}", task, RolloutStatus.DONE, 0.0, segments=(segment,))
            )
        return build_batch([Group("images", task, rollouts)])

    def ids(self, at: list[int]) -> Tensor:
        return torch.tensor([self.tokens[each].id for each in at])

    def positions(self) -> dict[int, tuple[int, int, int]]:
        """Time, row and column of each token: text counts on from the largest of an image."""
        found: dict[int, tuple[int, int, int]] = {}
        for path in self.paths:
            start = 0
            for at in path:
                _, image, part = self.tokens[at]
                if image < 0:
                    place = (start,) * 3
                    start += 1
                else:
                    rows, columns = (size // 2 for size in GRIDS[image])
                    place = (start, start + part // columns, start + part % columns)
                    start += max(rows, columns) if part == rows * columns - 1 else 0
                assert found.setdefault(at, place) == place
        return found

    def _text(self, count: int) -> list[int]:
        return self._added([Token(int(each)) for each in self._random.integers(1, 490, count)])

    def _image(self, image: int) -> list[int]:
        rows, columns = GRIDS[image]
        return self._added([Token(IMAGE, image, part) for part in range(rows * columns // 4)])

    def _added(self, tokens: list[Token]) -> list[int]:
        self.tokens += tokens
        return list(range(len(self.tokens) - len(tokens), len(self.tokens)))


class Model:
    def __init__(self, kind: str, tree: Tree) -> None:
        torch.manual_seed(0)
        self.model = AutoModelForImageTextToText.from_config(settings_of(kind))
        with torch.no_grad():
            randomize(self.model)
        self.model.eval()
        self.tree = tree
        self.grids = torch.tensor([[1, *grid] for grid in GRIDS])
        self.pixels = [torch.randn(rows * columns, 3 * 2 * 16 * 16) for rows, columns in GRIDS]

    def own(self) -> Tensor:
        """The model's own code, each path alone."""
        found = []
        for path in self.tree.paths:
            ids = self.tree.ids(path)[None]
            first = [t for at in path if (t := self.tree.tokens[at]).image >= 0 and not t.part]
            images = [token.image for token in first]
            logits = self.model(
                input_ids=ids,
                pixel_values=torch.cat([self.pixels[each] for each in images]),
                image_grid_thw=self.grids[images],
                mm_token_type_ids=(ids == IMAGE).int(),
            ).logits[0]
            found.append(logits.log_softmax(-1)[:-1].gather(1, ids[0][1:, None])[:, 0])
        return torch.cat(found)

    def packed(self, micro: MicroBatch, batch: Batch) -> Tensor:
        row = micro.ids.tolist()
        tokens = [self.tree.tokens[each] for each in row]
        ids, where = self.tree.ids(row), self.tree.positions()
        images = [
            self.model.model.get_image_features(pixels, self.grids[at : at + 1])
            for at, pixels in enumerate(self.pixels)
        ]
        levels = [[each.pooler_output[0] for each in images]]
        deep = [getattr(each, "deepstack_features", None) or () for each in images]
        levels += [[each[0] for each in level] for level in zip(*deep, strict=True)]
        here = [token for token in tokens if token.image >= 0]
        features = [torch.stack([of[t.image][t.part] for t in here]) for of in levels]
        mask = ids == IMAGE
        embedded = self.model.model.get_input_embeddings()(ids)
        more = {"visual_pos_masks": mask[None], "deepstack_visual_embeds": features[1:]}
        hidden = self.model.model.language_model(
            inputs_embeds=embedded.masked_scatter(mask[:, None], features[0])[None],
            position_ids=torch.tensor([where[each] for each in row]).T[:, None],
            layout=micro.layout,
            use_cache=False,
            **(more if features[1:] else {}),
        ).last_hidden_state[0]
        scores = self.model.lm_head(hidden[micro.predictors]).log_softmax(-1)
        targets = self.tree.ids(batch.ids[micro.targets].tolist())
        return scores.gather(1, targets[:, None])[:, 0]

    def gradients(self, logprobs: Tensor, weights: Tensor) -> dict[str, Tensor]:
        self.model.zero_grad()
        (logprobs * weights).sum().backward()  # type: ignore[no-untyped-call]
        named = self.model.named_parameters()
        return {name: each.grad.clone() for name, each in named if each.grad is not None}


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize("share_prefixes", [False, True], ids=["rows", "tree"])
def test_packed_images_are_the_models_own_computation(kind: str, share_prefixes: bool) -> None:
    with in_float64():
        tree = Tree()
        model, batch = Model(kind, tree), tree.batch()
        assert batch.ids.tolist() == [at for path in tree.paths for at in path[1:]]
        weights = torch.linspace(0.5, 1.5, len(batch.ids))
        own = model.own()
        expected = model.gradients(own, weights)
        use_packed_rows(model.model.model.language_model)
        (micro,) = pack(batch, max_tokens=1 << 20, share_prefixes=share_prefixes)
        assert (len(micro.ids) < sum(map(len, tree.paths))) == share_prefixes
        found = model.packed(micro, batch)
        assert (found - own[micro.targets]).abs().max() < 1e-10
        gradients = model.gradients(found, weights[micro.targets])
        assert gradients.keys() == expected.keys()
        assert any("visual" in name for name in gradients)
        for name, each in expected.items():
            torch.testing.assert_close(
                gradients[name], each, rtol=1e-9, atol=float(each.abs().max()) * 1e-9, msg=name
            )
