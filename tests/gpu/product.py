"""A matrix product as vLLM's attention on Triton writes it: it does not say how float32 is
multiplied."""

from __future__ import annotations

import ast
import inspect
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

H200 = GPUTarget("cuda", 90, 32)


@triton.jit
def product(left, right, out, SIZE: tl.constexpr):
    rows = tl.arange(0, SIZE)[:, None]
    columns = tl.arange(0, SIZE)[None, :]
    at = rows * SIZE + columns
    tl.store(out + at, tl.dot(tl.load(left + at), tl.load(right + at)))


def multiplies_in_tf32() -> bool:
    """Whether Triton compiles products of float32 for an H200 as TF32, in this environment."""
    signature = {"left": "*fp32", "right": "*fp32", "out": "*fp32", "SIZE": "constexpr"}
    source = ASTSource(fn=product, signature=signature, constexprs={"SIZE": 32})
    return "tf32" in triton.compile(source, target=H200).asm["ptx"]


def dots(module: Any) -> list[list[str]]:
    """The keywords of each `tl.dot` in a module."""
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(module))) if _is_dot(node)]
    return [[str(keyword.arg) for keyword in call.keywords] for call in calls]  # type: ignore[attr-defined]


def _is_dot(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.dot"
