"""Commands print on terminals that are not UTF-8."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "words"),
    [("trainer.cli", ["--help"]), ("proxy", ["run", "--help"]), ("proxy", ["sessions", "--help"])],
)
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_help_is_printed_in_an_encoding_without_its_characters(
    module: str, words: list[str], encoding: str
) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    command = [sys.executable, "-m", module, *words]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"usage: agentic-")
