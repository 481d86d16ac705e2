"""What our code uses of other packages is in the official wheels of the pinned versions.

`python -m tests.conformance` also compares the newest ones and writes docs/notes/conformance.md.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.conformance.check import check
from tests.conformance.library import Library
from tests.conformance.uses import Uses, collect, read
from tests.conformance.wheels import CONTENTS, PACKAGES, ROOT, fetch, pinned


@pytest.mark.programs
def test_pinned_versions_have_everything_that_our_code_uses() -> None:
    library = Library(fetch(ROOT / ".cache/conformance", pinned()).values())
    uses = collect(set(PACKAGES))
    assert len(uses.names) > 1000
    assert {"--enable-scale-out", "--weight-transfer-config"} <= uses.flags.keys()
    assert {"/update_weights", "/inference/v1/generate"} <= uses.routes.keys()
    assert "VLLM_SERVER_DEV_MODE" in uses.variables
    assert any(stand.base.endswith(".WeightSource") for stand in uses.stands)
    outcome = check(uses, library)
    assert not outcome.faults
    assert outcome.unknown < outcome.checked / 10


THEIRS = {
    "vllm/__init__.py": "from .inner import *\n",
    "vllm/inner.py": """
from dataclasses import dataclass, field
from abc import ABC, abstractmethod
from functools import cached_property

def loaded(path, *, strict=True): ...

@dataclass
class Options:
    size: int
    name: str = field(default="", metadata={})
    ids: list = field(metadata={}, default_factory=list)

class Source(ABC):
    @cached_property
    @abstractmethod
    def metadata(self): ...
    @abstractmethod
    def weights(self, rank): ...
    def held(self): ...
    def groups(self): ...

def send(source: Source | None):
    source.held()
""",
    "vllm/envs.py": 'variables = {"VLLM_KNOWN": 1}\n',
    "vllm/benchmarks/load.py": 'def main(): ...\nflag = "--rate"\n',
    "vllm/entrypoints/args.py": 'class ServeArgs:\n    max_len: int = 1\nroute = "/load"\n',
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    folder = tmp_path_factory.mktemp("wheel")
    for name, text in THEIRS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / CONTENTS).write_text("\n".join(THEIRS))
    return Library([folder])


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("from vllm import loaded\nloaded('a', strict=False)", ""),
        ("from vllm.inner import Options\nOptions(1).name", ""),
        ("from vllm import missing", "there is no vllm.missing"),
        (
            "from vllm.envs import loaded",
            "there is no vllm.envs.loaded, but vllm.inner.loaded",
        ),
        (
            "import vllm.other.inner",
            "there is no vllm.other.inner, but vllm.inner",
        ),
        ("import vllm.gone.away", "there is no vllm.gone.away"),
        ("import vllm\nvllm.inner.gone()", "there is no vllm.inner.gone"),
        ("from vllm import loaded\nloaded('a', loose=True)", "has no argument loose"),
        ("from vllm import loaded\nloaded()", "needs the argument path"),
        ("from vllm import loaded\nloaded(1, 2)", "takes 1 arguments by position, not 2"),
        ("from vllm import Options\nOptions(name='a')", "needs the argument size"),
        ("from vllm import Options\ndef f(o: Options): return o.gone", "no vllm.Options.gone"),
        ("from vllm import Options\no = Options(1)\no.gone", "no vllm.Options.gone"),
        (
            "class Mine:\n    CONFORMS_TO: str = 'vllm.inner.Source'\n"
            "    def metadata(self): ...\n    def weights(self, rank): ...\n"
            "    def held(self): ...",
            "Mine.metadata must be a property",
        ),
        (
            "import vllm.inner\nclass Mine:\n    CONFORMS_TO: str = 'vllm.inner.Source'\n"
            "    metadata = property()\n    def weights(self, rank): ...",
            "Mine lacks vllm.inner.Source.held",
        ),
        (
            "from vllm import Source\nclass Mine(Source):\n    @property\n"
            "    def metadata(self): ...",
            "Mine lacks vllm.Source.weights",
        ),
        (
            "from vllm import Source\nclass Mine(Source):\n    @property\n"
            "    def metadata(self): ...\n    def weights(self): ...",
            "takes 0 arguments by position, not 1",
        ),
        ("import os\nos.environ['VLLM_KNOWN'] = '1'", ""),
        ("import os\nos.environ['VLLM_GONE'] = '1'", "vLLM has no variable VLLM_GONE"),
        ("argv = ['--max-len', '1']", ""),
        ("argv = ['--rate', '1']", "vLLM has no flag --rate"),
        ("from vllm.benchmarks.load import main\nargv = ['--rate', '--max-len']", ""),
        ("argv = ['--gone']", "vLLM has no flag --gone"),
        ("post('/load')", ""),
        ("post('/unload')", "vLLM has no route /unload"),
        ("GONE = '/unload'\npost(GONE)", "vLLM has no route /unload"),
        ("opened('/unload')", "vLLM has no route /unload"),
        ("from pathlib import Path\nF = Path('/proc/net/if_inet6')", ""),
        ("import os\nF: str = '/dev/shm'\nos.statvfs(F)", ""),
        ("from importlib import import_module\nimport_module('vllm.inner').loaded('a')", ""),
        (
            "import importlib\nimportlib.import_module('vllm.gone')",
            "there is no vllm.gone",
        ),
        (
            "import importlib\nM = 'vllm.gone'\ndef f(): importlib.import_module(M)",
            "there is no vllm.gone",
        ),
        ("import runpy\nrunpy.run_module('vllm.gone')", "there is no vllm.gone"),
        (
            "from importlib import import_module\n"
            "def f():\n    it = import_module('vllm.inner')\n    it.gone()",
            "there is no vllm.inner.gone",
        ),
        (
            "from importlib import import_module\ndef ours(name): return import_module(name)\n"
            "def f():\n    it: object = import_module('vllm').Options\n    it(names=1, size=1)",
            "has no argument names",
        ),
        (
            "from importlib import import_module\n"
            "def _vllm(module): return import_module(f'vllm.{module}')\n"
            "_vllm('inner').gone = 1",
            "there is no vllm.inner.gone",
        ),
        (
            "from importlib import import_module\n"
            "def _vllm(module): return import_module(f'vllm.{module}')\n"
            "_vllm('inner').loaded(1, loose=True)\nother('gone')",
            "has no argument loose",
        ),
        ("import torch\nimport importlib\nimportlib.import_module(argument)", ""),
    ],
)
def test_use_that_does_not_fit_is_found(library: Library, source: str, fault: str) -> None:
    uses = Uses()
    read(ast.parse(source), "proxy/engines/vllm_mine.py", frozenset({"vllm"}), uses)
    faults = check(uses, library).faults
    assert len(faults) == bool(fault)
    assert fault in "".join(faults)


def test_local_names_hide_imported_ones(library: Library) -> None:
    uses = Uses()
    source = "import vllm\ndef f(vllm): return vllm.gone\ndef g():\n    vllm = 1\n    vllm.gone"
    read(ast.parse(source), "trainer/mine.py", frozenset({"vllm"}), uses)
    assert not check(uses, library).faults


@pytest.mark.parametrize(
    ("parameters", "fault"),
    [
        ("ctx, first, second", ""),  # as torch's autograd.Function has it
        ("ctx, *gradients", ""),
        ("", "takes 0 arguments by position, not 1"),
        ("ctx, first, *, named", "needs the argument named"),
    ],
)
def test_arguments_that_the_base_leaves_to_its_subclasses(
    tmp_path: Path, parameters: str, fault: str
) -> None:
    (tmp_path / "torch.py").write_text(
        "class Function:\n    @staticmethod\n    def backward(ctx, *grad_outputs): ..."
    )
    (tmp_path / CONTENTS).write_text("torch.py\ntorch/lib/libtorch.so")
    uses = Uses()
    source = "import torch\nclass Mine(torch.Function):\n    @staticmethod\n"
    source += f"    def backward({parameters}): ..."
    read(ast.parse(source), "trainer/mine.py", frozenset({"torch"}), uses)
    faults = check(uses, Library([tmp_path])).faults
    assert len(faults) == bool(fault)
    assert fault in "".join(faults)


@pytest.mark.parametrize(
    ("where", "is_checked"),
    [("proxy/engines/vllm_mine.py", True), ("trainer/mine.py", False)],
)
def test_flags_of_our_own_command_lines(where: str, is_checked: bool) -> None:
    """A file that starts vLLM gives it flags that our commands have as well."""
    uses = Uses()
    source = "from proxy.engines.vllm_server import VllmConfig\nx = ['--port', '--max-len']"
    read(ast.parse(source), where, frozenset({"vllm"}), uses, frozenset({"--port"}))
    assert uses.flags.keys() == {"--max-len"} | ({"--port"} if is_checked else set())


def test_each_package_is_pinned_and_the_page_is_of_these_versions() -> None:
    versions = pinned()
    assert versions.keys() == set(PACKAGES)
    page = (ROOT / "docs/notes/conformance.md").read_text("utf-8")
    for package, version in versions.items():
        assert f"\n| {package} | {version} | " in page
