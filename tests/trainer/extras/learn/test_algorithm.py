"""The loss of learning from evidence."""

from __future__ import annotations

import torch

from trainer.extras.learn.algorithm import Topr


def test_good_evidence_is_imitated_and_bad_evidence_tapers() -> None:
    """The gradient of a token is `-w A`, with w = 1 for A > 0, else min(1, π/μ of the sequence)."""
    logprobs = torch.tensor([-1.0, -2.0, -3.0, -4.0, -0.5], requires_grad=True)
    recorded = torch.tensor([-5.0, -0.1, -1.0, -2.0, -2.0])
    advantages = torch.tensor([1.0, 0.5, -1.0, -1.0, -1.0])
    sequence = torch.tensor([0, 0, 1, 1, 2])
    found = Topr().losses(logprobs, recorded, advantages, sequence)
    found.losses.sum().backward()
    tapered = torch.exp(torch.tensor(-4.0))
    expected = torch.tensor([-1.0, -0.5, tapered, tapered, 1.0])
    assert logprobs.grad is not None
    assert torch.allclose(logprobs.grad, expected)
    assert found.clipped.tolist() == [False, False, False, False, True]


def test_the_loss_of_bad_evidence_has_a_minimum() -> None:
    """An answer that is pushed down for ever would end training; TOPR stops."""
    steps = {}
    for name in ("topr", "reinforce"):
        logits = torch.zeros(4, requires_grad=True)
        recorded = torch.log_softmax(torch.zeros(4), 0)[:1]
        optimizer = torch.optim.SGD([logits], lr=1.0)
        for _ in range(400):
            own = torch.log_softmax(logits, 0)[:1]
            minus = torch.tensor([-1.0])
            loss = -minus * own
            if name == "topr":
                loss = Topr().losses(own, recorded, minus, torch.tensor([0])).losses
            optimizer.zero_grad()
            loss.sum().backward()
            optimizer.step()
        steps[name] = float(torch.log_softmax(logits, 0)[0].detach())
    assert steps["reinforce"] < -300
    assert -12 < steps["topr"] < -3
