from __future__ import annotations

from pathlib import Path

import pytest

from harbor_sdk.dockerfile import Copy, DockerfileError, Run, read_dockerfile, source_path


def _write(folder: Path, text: str) -> Path:
    path = folder / "Dockerfile"
    path.write_text(text)
    return path


def test_steps_keep_order_folder_and_variables(tmp_path: Path) -> None:
    build = read_dockerfile(
        _write(
            tmp_path,
            "# comment\nFROM python:3.12\nENV A=1 B='two words'\nWORKDIR /app\n"
            "RUN echo $A && \\\n  # inside\n  touch x\nWORKDIR sub\nENV C $A\n"
            'COPY data/ other.txt ./\nCOPY one.txt /etc/one\nRUN ["ls", "-l a"]\nCMD ["bash"]\n',
        )
    )
    assert build.workdir == "/app/sub"
    assert dict(build.env) == {"A": "1", "B": "two words", "C": "1"}
    assert build.steps == (
        Run("mkdir -p /app", "/", {}),
        Run("echo $A && touch x", "/app", {"A": "1", "B": "two words"}),
        Run("mkdir -p /app/sub", "/", {}),
        Copy(("data/", "other.txt"), "/app/sub", is_dir=True),
        Copy(("one.txt",), "/etc/one", is_dir=False),
        Run("ls '-l a'", "/app/sub", {"A": "1", "B": "two words", "C": "1"}),
    )


@pytest.mark.parametrize(
    "text",
    [
        "FROM a\nFROM b\n",
        "FROM a\nARG X=1\n",
        "FROM a\nUSER agent\n",
        "FROM a\nCOPY --from=build /x /y\n",
        "FROM a\nADD https://example.com/x /x\n",
        "FROM a\nRUN --mount=type=cache,target=/x true\n",
        "FROM a\nRUN <<EOF\n",
    ],
)
def test_instruction_that_needs_an_image_build_is_refused_by_name(
    tmp_path: Path, text: str
) -> None:
    with pytest.raises(DockerfileError, match="docker"):
        read_dockerfile(_write(tmp_path, text))


def test_path_of_the_dockerfile_precedes_that_of_the_sandbox(tmp_path: Path) -> None:
    build = read_dockerfile(_write(tmp_path, "FROM a\nENV PATH=/opt/bin:$PATH\n"))
    assert dict(build.env)["PATH"].startswith("/opt/bin:/usr/local/sbin:")


def test_copy_reaches_no_file_outside_the_environment_folder(tmp_path: Path) -> None:
    folder = tmp_path / "task/environment"
    folder.mkdir(parents=True)
    (tmp_path / "secret").write_text("the server's")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "data").write_text("the task's")
    (copied,) = read_dockerfile(_write(folder, "FROM a\nCOPY /data ../../secret link ./\n")).steps
    assert isinstance(copied, Copy)
    inside, *outside = copied.sources
    assert source_path(folder, inside).read_text() == "the task's"
    for source in (*outside, "sub/../.."):
        with pytest.raises(DockerfileError, match="is outside"):
            source_path(folder, source)
