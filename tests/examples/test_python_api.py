"""The notebook of the Python API: its code cells run in order, in one event loop."""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


async def test_cells_of_the_notebook_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(EXAMPLES)
    notebook = json.loads((EXAMPLES / "python_api.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}
    for cell in cells:
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        code = compile("".join(cell["source"]), cell["id"], "exec", flags)
        result = eval(code, names)
        if inspect.iscoroutine(result):
            await result
    said = capsys.readouterr().out
    assert "done 1.0 1 turns\ntotal: 96" in said
    assert "train stop" in said
    assert "version 1, loss" in said
    assert sorted(rollout.reward for rollout in names["groups"][0].rollouts) == [0, 0, 1, 1]
    assert not any(cell["outputs"] for cell in cells)
