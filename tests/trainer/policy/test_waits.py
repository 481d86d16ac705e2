"""The host does not wait for the card inside of a pass, whatever the architecture: its kernels are
issued while earlier ones run. `tests/trainer/card.py` counts the waits on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.trainer import test_card
from tests.trainer.card import pretended
from tests.trainer.policy.architectures import ARCHITECTURES, Architecture
from tests.trainer.policy.test_compiled_layers import small_model
from trainer.policy import attention, mask
from trainer.policy.context_parallel import ContextRanks
from trainer.policy.memory import _one_path
from trainer.policy.scorer import CausalScorer
from trainer.policy.shrink import VOCABULARY

CARD = torch.device("cuda:0")
TOKENS = 70
FAST = ("Qwen 3", "Qwen 3 MoE")
attention_of_a_cpu = test_card._attention_of_a_cpu


@pytest.fixture(autouse=True)
def _no_masks() -> Iterator[None]:
    yield
    mask.block_mask.cache_clear()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(each, marks=() if each.title in FAST else pytest.mark.long, id=each.title)
        for each in ARCHITECTURES
        if not each.refused
    ],
)
def test_pass_in_bfloat16_does_not_wait_for_the_card(
    architecture: Architecture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = small_model(architecture)
    micro = replace(_one_path(TOKENS, ContextRanks()), ids=torch.arange(TOKENS) % VOCABULARY)
    with pretended() as card:
        stand_in = attention.attend

        def uncounted(*given: Any, **named: Any) -> Any:
            """What only the stand-in for FlexAttention's kernel waits for."""
            before = [*card.waits]
            attended = stand_in(*given, **named)
            card.waits[:] = before
            return attended

        monkeypatch.setattr(attention, "attend", uncounted)
        scorer = CausalScorer(model.to(CARD), torch.bfloat16).train()
        on_card, ids = micro.to(CARD), torch.arange(TOKENS).to(CARD)
        card.waits.clear()
        scorer(on_card, ids, 1.0).logprobs.sum().backward()
        assert not card.waits, card.waits
