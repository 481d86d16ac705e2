"""What our code uses of other packages is in the official wheels of the pinned versions.

`make conformance` also compares the newest versions and writes docs/notes/conformance.md.
"""

from __future__ import annotations

import pytest

from tests.conformance.check import check
from tests.conformance.library import Library
from tests.conformance.uses import Uses, collect, read
from tests.conformance.wheels import CONTENTS, PACKAGES, ROOT, fetch, pinned


@pytest.mark.long
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
from dataclasses import dataclass
from abc import ABC, abstractmethod
from functools import cached_property

def loaded(path, *, strict=True): ...

@dataclass
class Options:
    size: int
    name: str = ""

class Source(ABC):
    @cached_property
    @abstractmethod
    def metadata(self): ...
    @abstractmethod
    def weights(self, rank): ...
""",
    "vllm/envs.py": 'variables = {"VLLM_KNOWN": 1}\n',
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
            "    def metadata(self): ...\n    def weights(self, rank): ...",
            "Mine.metadata must be a property",
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
        ("argv = ['--gone']", "vLLM has no flag --gone"),
        ("post('/load')", ""),
        ("post('/unload')", "vLLM has no route /unload"),
    ],
)
def test_use_that_does_not_fit_is_found(library: Library, source: str, fault: str) -> None:
    uses = Uses()
    read(source, "proxy/engines/vllm_mine.py", frozenset({"vllm"}), uses)
    faults = check(uses, library).faults
    assert len(faults) == bool(fault)
    assert fault in "".join(faults)


def test_local_names_hide_imported_ones(library: Library) -> None:
    uses = Uses()
    source = "import vllm\ndef f(vllm): return vllm.gone\ndef g():\n    vllm = 1\n    vllm.gone"
    read(source, "trainer/mine.py", frozenset({"vllm"}), uses)
    assert not check(uses, library).faults


def test_each_package_is_pinned() -> None:
    assert pinned().keys() == set(PACKAGES)
