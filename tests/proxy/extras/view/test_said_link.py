"""A link to the page is printed on a terminal only: elsewhere the output may be a log that agents
and other users read."""

from __future__ import annotations

import io
import re
import stat
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from proxy.extras.view.access import said_link

SECRET = "s3cret-of-the-link"
URL = "http://127.0.0.1:8000"


class Output(io.StringIO):
    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.mark.parametrize("terminal", [True, False])
def test_link_is_in_what_is_said_on_a_terminal_only(
    terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", Output(terminal=terminal))
    file = tmp_path / "state" / "proxy.link"
    said = said_link(URL, SECRET, file)
    assert URL in said
    assert "once, within 10 minutes" in said
    assert (SECRET in said) == terminal
    assert file.exists() != terminal
    if not terminal:
        assert str(file) in said
        assert file.read_text() == f"{URL}/#link={SECRET}\n"


def test_file_of_a_link_is_its_users_alone_whatever_lay_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", Output(terminal=False))
    file, other = tmp_path / "proxy.link", tmp_path / "other"
    other.write_text("precious")
    file.symlink_to(other)
    said_link(URL, SECRET, file)
    assert other.read_text() == "precious"
    assert stat.S_IMODE(file.lstat().st_mode) == 0o600


@pytest.mark.programs
@pytest.mark.parametrize("workers", [1, 2])
def test_link_in_the_file_of_serve_opens_the_page_where_it_listens(
    workers: int, checkpoint: Path, tmp_path: Path
) -> None:
    """The address is known only when the proxy listens."""
    argv = [sys.executable, "-m", "proxy", "serve", "--model", str(checkpoint), "--port", "0"]
    argv += ["--engine", "http://127.0.0.1:9", "--store", f"sqlite:///{tmp_path}/proxy.db"]
    argv += ["--workers", str(workers)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as serve:
        try:
            assert serve.stdout is not None
            said = next(line for line in serve.stdout if line.startswith("see everything"))
            found = re.search(r"live: (http\S+) \(the link in (\S+) opens it once", said)
            assert found is not None, said
            link = re.fullmatch(r"(http\S+)/#link=(\S+)\n", Path(found[2]).read_text())
            assert link is not None
            assert link[1] == found[1]
            answer = httpx.post(f"{link[1]}/view/log_in", json={"secret": link[2]})
            assert answer.status_code == 200
        finally:
            serve.terminate()
