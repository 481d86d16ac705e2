"""Which tool calls count as edits of tests, and that any text is read in linear time."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.search.edited_tests import edited_test, is_test


def command(text: str) -> dict[str, Any]:
    return {"command": text}


@pytest.mark.parametrize(
    ("tool", "arguments", "path"),
    [
        ("shell", command("echo 'x' > tests/test_a.py"), "tests/test_a.py"),
        ("bash", command('echo "1" >> "./tests/a.py"'), "./tests/a.py"),
        ("bash", command("cat <<'EOF' > conftest.py\nx = 1\nEOF"), "conftest.py"),
        ("bash", command("sed -i 's/1;2/2/' test_sum.py"), "test_sum.py"),
        ("bash", command("cd /repo && sudo rm -rf tests/unit"), "tests/unit"),
        ("bash", command("git checkout HEAD~1 -- tests/"), "tests/"),
        ("bash", command("cp /tmp/x tests/test_a.py"), "tests/test_a.py"),
        ("bash", command("echo ok | tee -a tests/expected.txt"), "tests/expected.txt"),
        ("shell", {"command": ["bash", "-lc", "mv a.py tests/b.py"]}, "tests/b.py"),
        ("shell", {"command": ["rm", "tests/b.py"]}, "tests/b.py"),
        ("shell", {"command": ["apply_patch", "*** Update File: tests/x.py\n"]}, "tests/x.py"),
        ("apply_patch", {"input": "*** Delete File: a/b.spec.ts\n"}, "a/b.spec.ts"),
        ("Edit", {"file_path": "/repo/tests/a.py", "old_string": "a"}, "/repo/tests/a.py"),
        ("MultiEdit", {"edits": [{"path": "x_test.go"}]}, "x_test.go"),
        ("str_replace", {"command": "str_replace", "path": "SumTest.java"}, "SumTest.java"),
    ],
)
def test_change_of_a_test_is_found(tool: str, arguments: dict[str, Any], path: str) -> None:
    assert edited_test(tool, json.dumps(arguments)) == path


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("shell", command("cat tests/test_a.py")),
        ("shell", command("pytest tests/ -q > /tmp/out.txt 2>&1")),
        ("shell", command("sed -i s/a+a/a+b/ src/sum.py && pytest tests/test_sum.py")),
        ("shell", command("sed -n 1,9p tests/test_sum.py")),
        ("shell", command("cp tests/test_a.py /tmp")),
        ("shell", command("git diff tests/")),
        ("shell", command("git checkout main && pytest tests")),
        ("Read", {"file_path": "tests/test_a.py"}),
        ("str_replace_based_edit_tool", {"command": "view", "path": "tests/test_a.py"}),
        ("Edit", {"file_path": "src/sum.py", "new_string": "rm tests/test_a.py"}),
        ("Write", {"file_path": "src/latest/contest.py", "content": "x"}),
        ("Write", {}),
    ],
)
def test_reading_running_and_other_edits_are_not_found(
    tool: str, arguments: dict[str, Any]
) -> None:
    assert edited_test(tool, json.dumps(arguments)) is None


def test_arguments_that_are_not_json_are_read_as_text() -> None:
    assert edited_test("bash", "rm tests/a.py") == "tests/a.py"
    assert edited_test("bash", "[" * 5000) is None
    assert edited_test("bash", '{"a":' * 900 + '"rm tests/a"' + "}" * 900) is None


@pytest.mark.parametrize("text", ["'", '"\\', "rm '", "> ", "a/", "sed -", "\n--- a/", "\\\n"])
@pytest.mark.parametrize("tool", ["shell", "Edit"])
def test_hostile_text_is_read_to_its_end(tool: str, text: str) -> None:
    long = text * (200_000 // len(text))
    for arguments in (long, json.dumps({"path": long}), json.dumps([[long]])):
        assert edited_test(tool, arguments) is None


def test_test_files_are_those_in_folders_of_tests_or_named_like_tests() -> None:
    assert all(map(is_test, ("a/tests/b", "__tests__/x.js", "test_a.py", "a_test.go", "x.test.ts")))
    assert not any(map(is_test, ("latest/a.py", "contest.py", "testing.md", "src/attest", "")))
