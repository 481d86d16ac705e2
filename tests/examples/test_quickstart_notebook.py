"""The notebook that looks at a run: what it shows, and that its cells run."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"
EXECUTES = """
import sys
import nbformat
from nbclient import NotebookClient
path, folder, timeout_s = sys.argv[1:]
notebook = nbformat.read(path, 4)
where = {"metadata": {"path": folder}}
NotebookClient(notebook, timeout=int(timeout_s), kernel_name="python3", resources=where).execute()
print("".join(o.get("text", "") for c in notebook.cells for o in c.get("outputs", [])))
"""


def cells() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return found


def test_it_has_twenty_cells_six_imports_and_shows_its_outputs() -> None:
    code = [each for each in cells() if each["cell_type"] == "code"]
    trees = [ast.parse("".join(each["source"])) for each in code]
    imports = [
        node
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert len(cells()) == 20
    assert len(imports) <= 6
    shown = [output for each in code for output in each["outputs"]]
    text = "".join("".join(output.get("text", "")) for output in shown)
    assert sum("image/png" in output.get("data", {}) for output in shown) == 3
    assert "verdict: learning" in text
    assert "have the recorded weights" in text
    assert "/home/" not in text
    assert str(ROOT) not in text


@pytest.mark.long
def test_its_cells_run_in_a_jupyter_of_their_own(tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    uv = [str(Path(sys.executable).with_name("uv"))]
    subprocess.run([*uv, "venv", "-q", "--python", sys.executable, environment], check=True)
    python = environment / "bin" / "python"
    wanted = ["nbclient", "ipykernel", "matplotlib", "pandas", "nbformat"]
    subprocess.run([*uv, "pip", "install", "-q", "--python", python, *wanted], check=True)
    for name in (".venv", "examples", "agentic_trainer.yaml"):
        (tmp_path / name).symlink_to(ROOT / name)
    copy = shutil.copy(NOTEBOOK, tmp_path)
    done = subprocess.run(
        [python, "-c", EXECUTES, copy, tmp_path, "900"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"IPYTHONDIR": str(tmp_path / "ipython"), "HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "tokens delivered in 512 sessions" in done.stdout
    assert "have the recorded weights" in done.stdout
