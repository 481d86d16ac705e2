"""Linear layers whose products are made by oneDNN compute what PyTorch's own do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from trainer.policy import cpu_linear
from trainer.policy.cpu_linear import BLOCK_TOKENS, WideLinear, use_wide_products


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of products that were given to oneDNN."""
    shapes: list[tuple[int, ...]] = []
    product = cpu_linear._product

    def counted(x: Tensor, weight: Tensor) -> Tensor:
        shapes.append((*x.shape, len(weight)))
        return product(x, weight)

    monkeypatch.setattr(cpu_linear, "_product", counted)
    monkeypatch.setattr(cpu_linear, "_mkl_is_narrow", lambda: True)
    return shapes


def pair(*, bias: bool) -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    plain, wide = nn.Linear(48, 80, bias=bias), nn.Linear(48, 80, bias=bias)
    wide.load_state_dict(plain.state_dict())
    use_wide_products(nn.Sequential(wide))
    assert type(wide) is WideLinear
    return plain, wide


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tokens", [BLOCK_TOKENS, BLOCK_TOKENS + 1, 3 * BLOCK_TOKENS - 1])
@pytest.mark.parametrize("form", ["row", "batch", "transposed"])
def test_output_and_gradients_are_those_of_torch(
    calls: list[tuple[int, ...]], bias: bool, tokens: int, form: str
) -> None:
    plain, wide = pair(bias=bias)
    x = torch.randn(48, tokens).t() if form == "transposed" else torch.randn(tokens, 48)
    x = x[None] if form == "row" else x
    x = torch.stack([x, x * 2]) if form == "batch" else x
    results = []
    for layer in (plain, wide):
        given = x.clone().requires_grad_()
        out = layer(given)
        out.square().sum().backward()
        results.append([out, given.grad, *(weight.grad for weight in layer.parameters())])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(
            found, expected, rtol=1e-5, atol=1e-5 * float(expected.detach().abs().max())
        )
    assert calls


def test_shapes_do_not_depend_on_the_number_of_tokens(calls: list[tuple[int, ...]]) -> None:
    """oneDNN keeps machine code of 1 to 3 MB for each."""
    _, wide = pair(bias=True)
    for tokens in range(BLOCK_TOKENS, 3 * BLOCK_TOKENS, 97):
        wide(torch.randn(tokens, 48, requires_grad=True)).sum().backward()
    size = BLOCK_TOKENS
    assert set(calls) == {(size, 48, 80), (size, 80, 48), (80, size, 48)}


def test_frozen_layer_passes_the_gradient_on(calls: list[tuple[int, ...]]) -> None:
    plain, wide = (layer.requires_grad_(False) for layer in pair(bias=True))
    x = torch.randn(2, 700, 48, requires_grad=True)
    (expected,) = torch.autograd.grad(plain(x).sum(), x)
    (found,) = torch.autograd.grad(wide(x).sum(), x)
    torch.testing.assert_close(found, expected)
    assert wide.weight.grad is None
    assert calls


def test_other_types_and_few_tokens_are_left_to_torch(calls: list[tuple[int, ...]]) -> None:
    plain, wide = pair(bias=True)
    few, many = torch.randn(BLOCK_TOKENS - 1, 48), torch.randn(BLOCK_TOKENS, 48)
    assert torch.equal(wide(few), plain(few))
    with torch.autocast("cpu", torch.bfloat16):
        assert wide(many).dtype == torch.bfloat16
    assert wide.double()(many.double()).dtype == torch.float64
    assert calls == []


def test_only_plain_linear_layers_change(monkeypatch: pytest.MonkeyPatch) -> None:
    class OtherLinear(nn.Linear):
        pass

    monkeypatch.setattr(cpu_linear, "_mkl_is_narrow", lambda: False)
    model = nn.ModuleList([nn.Linear(2, 2), OtherLinear(2, 2), nn.LayerNorm(2)])
    use_wide_products(model)
    assert [type(each) for each in model] == [nn.Linear, OtherLinear, nn.LayerNorm]
    monkeypatch.setattr(cpu_linear, "_mkl_is_narrow", lambda: True)
    use_wide_products(model)
    assert [type(each) for each in model] == [WideLinear, OtherLinear, nn.LayerNorm]
