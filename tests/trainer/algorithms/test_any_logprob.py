"""Whatever number an engine sends as a log-probability, its answer is refused, or it is trained
with finite losses and gradients, whatever the trainer computes for the same tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from proxy.engines.answer_check import MAX_LOGPROB, MIN_LOGPROB, AnswerCheck
from proxy.engines.protocol import Chunk, Sampling
from proxy.errors import EngineError
from tests.trainer.algorithms.test_advantages import batch_of, trial
from trainer.algorithms import Algorithm, AlgorithmConfig
from trainer.algorithms.policy_losses import LOSSES

TOKENS = 3
LOWEST = -1e9
"""Of the trainer's own. A model with larger logits is broken, and the step ends with its words."""
sent = st.floats() | st.floats(MIN_LOGPROB, MAX_LOGPROB) | st.floats(-1e-300, 1e-300)
computed = st.floats(LOWEST, 0, width=32) | st.floats(-200, 0, width=32)
levels = st.sampled_from(["token", "sequence", "geometric"])
weights = st.none() | st.fixed_dictionaries(
    {"name": st.sampled_from(["truncate", "mask"]), "level": levels}
)
rejections = st.sampled_from(
    [
        {"name": "veto"},
        {"name": "divergence", "upper": 0.4, "scope": "token"},
        {"name": "divergence", "upper": 0.4, "scope": "sequence_sum", "estimator": "k3"},
        {"name": "binary_divergence", "upper": 0.4},
        {"name": "second_moment"},
    ]
)
terms = st.fixed_dictionaries(
    {},
    optional={
        "entropy_coefficient": st.just(0.1),
        "kl": st.fixed_dictionaries(
            {
                "coefficient": st.just(0.1),
                "estimator": st.sampled_from(["k1", "k2", "k3", "abs"]),
                "where": st.sampled_from(["loss", "reward"]),
            }
        ),
        "distillation": st.just({"teacher": "t"}),
    },
)


def columns(values: st.SearchStrategy[float]) -> st.SearchStrategy[list[float]]:
    """The values of two trials' tokens."""
    return st.lists(values, min_size=2 * TOKENS, max_size=2 * TOKENS)


@given(
    behaviour=columns(sent),
    trained=columns(computed),
    start=columns(computed),
    reference=columns(computed),
    loss=st.sampled_from(LOSSES.names),
    weight=weights,
    reject=st.lists(rejections, max_size=2),
    more=terms,
)
def test_any_log_probability_is_refused_or_trained_with_finite_gradients(
    behaviour: list[float],
    trained: list[float],
    start: list[float],
    reference: list[float],
    loss: str,
    weight: dict[str, Any] | None,
    reject: list[dict[str, Any]],
    more: dict[str, Any],
) -> None:
    try:
        for each in (behaviour[:TOKENS], behaviour[TOKENS:]):
            sampling = Sampling(max_tokens=TOKENS)
            AnswerCheck(sampling, vocab_size=9).take(Chunk([5] * TOKENS, each))
    except EngineError:
        behaviour = [min(max(x, MIN_LOGPROB), MAX_LOGPROB) if x == x else 0.0 for x in behaviour]
    batch = batch_of([trial("a", 1.0, 1, tokens=TOKENS), trial("b", 0.0, 1, tokens=TOKENS)])
    batch.logprobs = torch.tensor(np.array(behaviour, np.float32))
    batch.prox_logprobs = torch.tensor(start)
    batch.ref_logprobs = batch.teacher_logprobs = torch.tensor(reference)
    correction = {"weight": weight, "reject": reject}
    settings = {"loss": {"name": loss}, "correction": correction, **more}
    algorithm = Algorithm(AlgorithmConfig.model_validate(settings))
    algorithm.compute_advantages(batch)
    logprobs = torch.tensor(trained).requires_grad_()
    entropy = torch.ones(len(trained)).requires_grad_()
    losses = algorithm.loss(batch)(logprobs, entropy, torch.arange(len(trained))).losses
    assert torch.isfinite(losses).all()
    if losses.requires_grad:
        losses.sum().backward()
    for gradient in (logprobs.grad, entropy.grad):
        assert gradient is None or torch.isfinite(gradient).all()
