"""Files that an agent leaves so that the judge's own tools reward it. Each is tried with a judge
that is not fooled by the agent's wrong work."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from agent_loop.processes.seals import new_seal, open_sealed, sealed
from agent_loop.records import Graded, Task, Trial
from agent_loop.rewards.bench import _isolated
from agent_loop.rewards.verifier import Verifier, VerifierConfig
from proxy import wall
from proxy.machine import landlock
from proxy.wall import Wall
from tests.agent_loop.recorded import finished

REFUSED = wall.missing() or landlock.missing()
COLLECTS = 'addopts = "--collect-only"\n'
PLANTED = {
    "pytest.toml": "[pytest]\naddopts = ['--collect-only']\n",
    ".pytest.toml": "[pytest]\naddopts = ['--collect-only']\n",
    "pyproject.toml": f"[tool.pytest.ini_options]\n{COLLECTS}",
    "pytest.py": "raise SystemExit(0)\n",
    "json.py": "raise SystemExit(0)\n",
    "": "",
}
TEST = """import sys
sys.path.insert(0, ".")
from adder import add
sys.path.pop(0)
def test(): assert add(2, 2) == 4
"""
"""It takes the work from the working directory, and nothing else."""
COPIES = "import json, shutil, subprocess, sys\nshutil.copy(sys.argv[1] + '/test_sum.py', '.')\n"
RUN = "[sys.executable, '-m', 'pytest', '-q', 'test_sum.py']"
SCRIPTS = {
    "verify.py": f"{COPIES}sys.exit(subprocess.run({RUN}).returncode)\n",
    "verify.sh": f'cp "$1"/test_sum.py . && {sys.executable} -m pytest -q test_sum.py\n',
}


def judges(hidden: Path) -> dict[str, Sequence[str]]:
    test = str(hidden / "test_sum.py")
    return {
        "-m": (sys.executable, "-m", "pytest", "-q", test),
        "-u -m": (sys.executable, "-u", "-m", "pytest", "-q", test),
        "-c": (sys.executable, "-B", "-c", "import json; raise SystemExit(1)"),
        "script": (sys.executable, str(hidden / "verify.py"), str(hidden)),
        "shell": ("bash", str(hidden / "verify.sh"), str(hidden)),
    }


ALWAYS = {("script", name) for name in PLANTED} | {
    *(("shell", "pytest.toml"), ("shell", "pytest.py")),
    *(("-m", "pyproject.toml"), ("-m", "json.py")),
    *(("-u -m", ".pytest.toml"), ("-c", "json.py")),
}
"""Each judge and each file; the other pairs are long."""


@pytest.mark.skipif(REFUSED is not None, reason=str(REFUSED))
@pytest.mark.parametrize(
    ("judge", "name"),
    [
        pytest.param(*pair, marks=[] if pair in ALWAYS else pytest.mark.long)
        for pair in itertools.product(judges(Path()), PLANTED)
    ],
)
async def test_no_planted_file_rewards_wrong_work(name: str, judge: str, tmp_path: Path) -> None:
    hidden, folder = tmp_path / "hidden", tmp_path / "trials" / "t-1"
    hidden.mkdir()
    (hidden / "test_sum.py").write_text(TEST)
    for file, text in SCRIPTS.items():
        (hidden / file).write_text(text)
    trial = Trial(
        *("t-1", Task("task", {"prompt": "x"}), "http://127.0.0.1:9/v1", "k", "policy"),
        *(folder, 60.0),
        wall=Wall(hide=(str(hidden),)),
    )
    trial.workspace.mkdir(parents=True)
    (trial.workspace / "adder.py").write_text("def add(a, b): return 5\n")
    if name:
        (trial.workspace / name).write_text(PLANTED[name])
    settings = VerifierConfig(argv=tuple(judges(hidden)[judge]), show=(str(hidden),))
    verifier = Verifier(settings)
    try:
        assert await verifier.grade(finished(trial)) == Graded(0.0)
    finally:
        await verifier.close()


@pytest.mark.parametrize(
    ("words", "isolated"),
    [
        (("-m", "pytest"), True),
        (("-u", "-m", "pytest"), True),
        (("-W", "ignore", "-Bum", "pytest"), True),
        (("-c", "pass"), True),
        (("-",), True),
        (("/judge/verify.py", "-m", "x"), False),
        (("-X", "dev", "/judge/verify.py", "-c"), False),
    ],
)
def test_python_takes_no_module_from_the_working_directory(
    words: Sequence[str], isolated: bool
) -> None:
    assert _isolated(["/usr/bin/python3", *words])[1:] == ["-P"] * isolated + [*words]


def test_what_a_function_returned_can_only_be_written_by_itself(tmp_path: Path) -> None:
    file, seal = tmp_path / "returned.json", new_seal()
    file.write_text(sealed("0.5", seal))
    assert open_sealed(file, seal)
    assert file.read_text() == "0.5"
    own = sealed("0.5", seal)
    forged = ["1.0", own.replace("0.5", "1.0"), sealed("1.0", new_seal()), own + " ", "", "\n1.0"]
    for text in forged:
        file.write_text(text)
        assert not open_sealed(file, seal)
        assert file.read_text() == ""
