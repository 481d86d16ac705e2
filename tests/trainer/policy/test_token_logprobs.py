"""Chunked log-probabilities and entropies compared with log_softmax over the whole vocabulary."""

from __future__ import annotations

import functools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from trainer.policy import token_logprobs as module
from trainer.policy.token_logprobs import OutputLayer, token_logprobs


@pytest.mark.parametrize("chunk_logits", [1 << 24, 150], ids=["one chunk", "many chunks"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(
    ("scale", "softcap", "with_bias"),
    [(1.0, None, False), (0.25, None, True), (1.0, 3.0, False), (2.0, 3.0, True)],
)
def test_values_and_gradients_equal_those_of_log_softmax(
    monkeypatch: pytest.MonkeyPatch,
    chunk_logits: int,
    temperature: float,
    scale: float,
    softcap: float | None,
    with_bias: bool,
) -> None:
    monkeypatch.setattr(module, "CHUNK_LOGITS", chunk_logits)
    monkeypatch.setattr(module, "MIN_ROWS", 1)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        (torch.randn(shape, generator=generator) * 2).requires_grad_()
        for shape in ((11, 6), (40, 6))
    )
    ids = torch.randint(0, 40, (11,), generator=generator)
    a, b = torch.randn(2, 11, generator=generator)

    bias = torch.randn(40, generator=generator).requires_grad_()
    trained = (hidden, weight, bias) if with_bias else (hidden, weight)
    logits = (hidden @ weight.T + (bias if with_bias else 0)) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    whole = (logits / temperature).log_softmax(-1)
    expected = whole.gather(1, ids[:, None])[:, 0], -(whole.exp() * whole).sum(-1)
    head = OutputLayer(weight, bias if with_bias else None, scale, softcap)
    got = token_logprobs(hidden, head, ids, temperature, entropy_grad=True)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    gradients = [
        torch.autograd.grad((logp * a + entropy * b).sum(), trained)
        for logp, entropy in (got, expected)
    ]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("rows", [3, 100])
def test_distribution_over_what_was_left_has_the_values_and_gradients_of_a_softmax_over_it(
    monkeypatch: pytest.MonkeyPatch, rows: int, softcap: float | None
) -> None:
    """Rows of 1 to 5 tokens of 40, and one of all; in chunks and in one."""
    monkeypatch.setattr(module, "CHUNK_LOGITS", rows * 40)
    monkeypatch.setattr(module, "MIN_ROWS", 1)
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (
        (torch.randn(shape, generator=generator) * 2).requires_grad_()
        for shape in ((11, 6), (40, 6))
    )
    orders = [torch.randperm(40, generator=generator)[:5] for _ in range(11)]
    kept = torch.stack(
        [torch.where(torch.arange(5) <= n % 5, o, o[0]) for n, o in enumerate(orders)]
    )
    ids = kept[torch.arange(11), torch.arange(11) % 3 % (torch.arange(11) % 5 + 1)]
    kept[7] = -1
    a, b = torch.randn(2, 11, generator=generator)
    logits = hidden @ weight.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    expected = []
    for row in range(11):
        own = kept[row].unique() if row != 7 else torch.arange(40)
        over = (logits[row, own] / 0.7).log_softmax(-1)
        expected.append((over[own == ids[row]][0], -(over.exp() * over).sum()))
    head = OutputLayer(weight, softcap=softcap)
    got = token_logprobs(hidden, head, ids, 0.7, kept=kept, entropy_grad=True)
    whole = [torch.stack(each) for each in zip(*expected, strict=True)]
    for mine, theirs in zip(got, whole, strict=True):
        torch.testing.assert_close(mine, theirs)
    gradients = [
        torch.autograd.grad((logp * a + entropy * b).sum(), (hidden, weight))
        for logp, entropy in (got, whole)
    ]
    for mine, theirs in zip(*gradients, strict=True):
        assert torch.isfinite(mine).all()
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("softcap", [None, 500.0])
def test_excluded_tokens_have_no_probability_where_logits_are_low_and_the_temperature_is_too(
    softcap: float | None,
) -> None:
    """Such as the logits of GPT-2, which are about -100, at the lowest temperature of vLLM."""
    hidden = torch.ones(1, 1, requires_grad=True)
    weight = torch.tensor([[-130.0], [-130.002], [-90.0]], requires_grad=True)
    head = OutputLayer(weight, softcap=softcap)
    kept = torch.tensor([[0, 1]])
    logp, entropy = token_logprobs(
        hidden, head, torch.tensor([0]), 0.01, kept=kept, entropy_grad=True
    )
    logits = weight.detach()[:, 0]
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    over = (logits[:2] / 0.01).log_softmax(-1)
    torch.testing.assert_close(logp[0], over[0], atol=1e-2, rtol=0)
    torch.testing.assert_close(entropy[0], -(over.exp() * over).sum(), atol=1e-2, rtol=0)
    (gradient,) = torch.autograd.grad((logp + 100 * entropy).sum(), weight)
    assert torch.isfinite(gradient).all()
    assert gradient[2] == 0


def test_token_that_only_a_larger_vocabulary_has_is_not_left() -> None:
    """Of a teacher or a reference with fewer rows of padding than the policy."""
    hidden, weight = torch.randn(2, 3), torch.randn(4, 3)
    kept, ids = torch.tensor([[1, 2, 4], [6, 0, 3]]), torch.tensor([1, 3])
    logp, entropy = token_logprobs(hidden, OutputLayer(weight), ids, 1.0, kept=kept)
    for row, own in enumerate(([1, 2], [0, 3])):
        over = (hidden @ weight.T)[row, own].log_softmax(-1)
        torch.testing.assert_close(logp[row], over[own.index(int(ids[row]))])
        torch.testing.assert_close(entropy[row], -(over.exp() * over).sum())


def test_entropy_has_no_gradient_without_a_bonus() -> None:
    hidden = torch.randn(3, 4, requires_grad=True)
    logp, entropy = token_logprobs(
        hidden, OutputLayer(torch.randn(9, 4)), torch.tensor([1, 2, 3]), 1.0
    )
    assert logp.requires_grad
    assert not entropy.requires_grad


def test_gradient_in_bfloat16_is_that_of_float32_up_to_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In several chunks, and in several blocks of the vocabulary, of which the last is smaller."""
    monkeypatch.setattr(module, "CHUNK_LOGITS", 150)
    monkeypatch.setattr(module, "MIN_ROWS", 1)
    monkeypatch.setattr(module, "BLOCK_PRODUCTS", 100)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(shape, generator=generator).bfloat16() for shape in ((11, 6), (40, 6))
    )
    ids = torch.randint(0, 40, (11,), generator=generator)
    gradients: list[torch.Tensor] = []
    for dtype in (torch.bfloat16, torch.float32):
        trained = weight.float().requires_grad_()
        logp, _ = token_logprobs(hidden.to(dtype), OutputLayer(trained), ids, 1.0)
        gradients += torch.autograd.grad(logp.sum(), [trained])
    torch.testing.assert_close(*gradients, atol=0.03, rtol=0.03)


def test_chunk_of_a_large_vocabulary_has_many_rows() -> None:
    """So that the whole weight is not read for a few rows."""
    assert module.chunk_rows(262_144) == 256
    assert module.chunk_rows(32_768) == 512


@pytest.mark.parametrize(("gigabytes", "rows"), [(24, 256), (80, 1280), (141, 2304)])
def test_chunk_grows_with_the_memory_of_a_gpu(gigabytes: int, rows: int) -> None:
    assert module.chunk_rows(151_936, gigabytes * 10**9) == rows


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("left", [False, True])
def test_fused_chunks_are_the_eager_ones_in_one_graph_for_any_number_of_rows(
    monkeypatch: pytest.MonkeyPatch, backend: str, softcap: float | None, left: bool
) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    chosen = functools.partial(module.compiled.__wrapped__, backend=counter)
    monkeypatch.setattr(module, "compiled", functools.cache(chosen))
    monkeypatch.setattr(module, "CHUNK_LOGITS", 4 * 40)
    monkeypatch.setattr(module, "MIN_ROWS", 1)
    weight, bias = torch.randn(40, 6), torch.randn(40)
    for count in (11, 6, 8):
        hidden, ids = torch.randn(count, 6).bfloat16(), torch.arange(count)
        kept = ids[:, None] + torch.arange(5) if left else None
        a, b = torch.randn(2, count)
        gradients, values = [], []
        for fused in (False, True):
            trained = [each.clone().requires_grad_() for each in (hidden, weight, bias)]
            head = OutputLayer(trained[1], trained[2], 0.5, softcap)
            logp, entropy = token_logprobs(
                trained[0], head, ids, 0.7, kept=kept, entropy_grad=True, fused=fused
            )
            values.append((logp.detach(), entropy.detach()))
            gradients.append(torch.autograd.grad((logp * a + entropy * b).sum(), trained))
        torch.testing.assert_close(*values)
        torch.testing.assert_close(*gradients, atol=0.05, rtol=0.05)
    assert counter.frame_count == 2
    torch._dynamo.reset()
