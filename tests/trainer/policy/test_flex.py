"""FlexAttention is compiled for training, and rarely: counted by a backend that runs its graphs.

The kernels themselves need a GPU; how often torch compiles, and what, it decides without one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention as torch_flex
from transformers import AutoModelForCausalLM

from tests.trainer.policy.architectures import ARCHITECTURES, Architecture
from trainer.policy import attention, flex
from trainer.policy.architecture import without_noise
from trainer.policy.context_parallel import ContextRanks
from trainer.policy.mask import AttentionMask
from trainer.policy.memory import _one_path
from trainer.policy.scorer import CausalScorer, use_packed_rows
from trainer.policy.shrink import shrunk
from trainer.rows.kept import Segment
from trainer.rows.packing import Layout

LENGTHS = (300, 2, 128, 129, 400)
"""Tokens of rows: of one block, of two, of as many as there are heads, and of more."""
MOST_GRAPHS = 2
"""With a window, of short rows too, and for whole paths; or for two shapes of heads."""
SHAPES = ((2, 16), (4, 32), (8, 64), (6, 24), (3, 48))
"""Numbers of heads, and their sizes."""
PAST = 40
"""Tokens of an earlier piece."""
TRAINED = [each for each in ARCHITECTURES if not each.refused]
FAST = ("Gemma 2", "gpt-oss")
"""A soft cap, windows and sinks."""


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounterWithBackend]:
    """Counts the graphs that attention compiles, which runs on a CPU as it does on a GPU."""
    torch._dynamo.reset()
    counters.clear()
    counted = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)  # no gradient on a CPU
    monkeypatch.setattr(flex, "flex_attention", flex.compiled(counted))
    monkeypatch.setattr(attention, "attend", flex.flex_attend)
    yield counted
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(each, marks=() if each.title in FAST else pytest.mark.long, id=each.title)
        for each in TRAINED
    ],
)
def test_architecture_compiles_few_graphs_without_a_break(
    architecture: Architecture, counter: Any
) -> None:
    small = shrunk(without_noise(architecture.settings()))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small).train()
    use_packed_rows(model)
    scorer = CausalScorer(model, torch.float32)
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for tokens in LENGTHS:
            micro = _one_path(tokens, ContextRanks(1))
            ids = torch.zeros(tokens, dtype=torch.int64)
            with torch.no_grad():
                expected = scorer(micro, ids, 1.0).logprobs
            logprobs = scorer(micro, ids, 1.0).logprobs
            torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
            logprobs.sum().backward()
    assert 0 < counter.frame_count <= MOST_GRAPHS
    assert not counters["graph_break"]


@pytest.mark.filterwarnings("ignore")
def test_rows_of_several_shapes_of_heads_are_all_compiled(counter: Any) -> None:
    """As of a policy, a critic and teachers in one process; torch's own limit is 8 graphs."""
    for heads, size in SHAPES:
        for tokens in LENGTHS:
            query, key, value = (
                torch.randn((1, tokens, heads, size), requires_grad=True).transpose(1, 2)
                for _ in range(3)
            )
            past = Segment(*(torch.randn((1, heads, PAST, size)) for _ in range(2)))
            row = _one_path(tokens, ContextRanks(1)).layout
            after = Layout(row.last_ends + PAST, row.longest + PAST, (PAST,), front=PAST)
            for window, each in product((None, 16), ((row, ()), (after, (past,)))):
                mask = AttentionMask(each[0], window)
                attend = partial(
                    flex.flex_attend, mask=mask, scale=size**-0.5, softcap=30.0, past=each[1]
                )
                out = attend(query, key, value)
                out.sum().backward()
                with torch.no_grad():
                    torch.testing.assert_close(attend(query, key, value), out)
    assert 8 < counter.frame_count <= len(SHAPES) * MOST_GRAPHS
    assert not counters["graph_break"]
