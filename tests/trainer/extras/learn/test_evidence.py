"""What sources read in a session."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from proxy.records import Mark, RuleAction, TurnStatus
from tests.trainer.extras.learn.days import Conversation, session
from trainer.extras.learn.evidence import (
    Corrections,
    Failures,
    Kept,
    RanTests,
    Rating,
    Rewards,
    has_passed,
)
from trainer.extras.learn.judging import is_due, judged
from trainer.extras.learn.seen import Call, Seen


def seen(talk: Conversation, now: float = 2000.0, **more: Any) -> Seen:
    return Seen(session(talk.name, **more), talk.turns, now)


def findings(source: Any, found: Seen) -> list[tuple[float, int | None]]:
    return [(each.sign, each.turn) for each in source.judge(found)]


def talk(*steps: tuple[str, str]) -> Conversation:
    """Commands of an agent, each with what it printed."""
    made = Conversation("s").user("Fix the tests.")
    for command, printed in steps:
        made.answer(call=("bash", {"command": command})).result(printed)
    return made.answer("Done.")


def ran(code: int) -> str:
    return f'{{"returncode": {code}, "output": ""}}'


@pytest.mark.parametrize(("value", "sign"), [(1.0, 1.0), (0.0, -1.0), (0.5, 0.0), (5.0, 1.0)])
def test_a_rating_is_from_bad_to_good(value: float, sign: float) -> None:
    assert findings(Rating(), seen(talk(), rating=value)) == [(sign, None)]
    assert findings(Rating(), seen(talk())) == []
    assert findings(Rewards(key="rating"), seen(talk(), rating=value)) == [(sign, None)]


@pytest.mark.parametrize(
    ("steps", "signs"),
    [
        ([("pytest -q", ran(1)), ("sed -i s/a/b/ x.py", ran(0)), ("pytest -q", ran(0))], [1.0]),
        ([("pytest -q", ran(0)), ("sed -i s/a/b/ x.py", ran(0)), ("pytest -q", ran(1))], [-1.0]),
        ([("pytest -q", "2 failed, 3 passed"), ("npm test", "5 passed")], [1.0]),
        ([("make check", "Exit code 2"), ("make", "x"), ("make check", "exit code: 0")], [1.0]),
        ([("pytest -q", ran(0)), ("pytest -q", ran(0))], []),
        ([("pytest -q", ran(1))], []),
        ([("pytest -q", "0 failed, 3 passed")], []),
        ([("ls", ran(1)), ("ls", ran(0))], []),
        ([("grep -rn pytest setup.cfg", ran(1)), ("pip install pytest", ran(0))], []),
        ([("cat 'my tox.ini' | grep \"pytest|tox\"", ran(1)), ("pytest", ran(0))], []),
        ([("bash -lc 'cd a && pytest'", ran(1)), ("PATH=x python -m pytest", ran(0))], [1.0]),
        ([("cat <<'E' > a\nit's\nE\npytest", ran(1)), ("(cd a; pytest) 2>&1", ran(0))], [1.0]),
        (
            [("pytest", ran(1)), ("sed -i s/1/2/ tests/test_a.py", ran(0)), ("pytest", ran(0))],
            [0.0],
        ),
    ],
)
def test_tests_are_good_if_green_comes_after_red_and_no_test_was_changed(
    steps: list[tuple[str, str]], signs: list[float]
) -> None:
    assert [sign for sign, _ in findings(RanTests(), seen(talk(*steps)))] == signs


@pytest.mark.parametrize(
    ("printed", "passed"),
    [
        ("<returncode>1</returncode>\n<output>\n5 passed", False),
        ("<returncode>0</returncode>\n<output>\n1 failed before", True),
        ("Process exited with code 1\nOutput:\n4 passed", False),
        ("Exit code 1\n4 passed", False),
        ("exit_code=0", True),
        ("=== 3 failed, 2 passed ===\n>       exit_code = 0\n", False),
        ('assert "exit_code" in said  # 0\n12 passed', True),
        ("Ran 3 tests in 0.1s\n\nFAILED (failures=1)", False),
        ("nothing", None),
    ],
)
def test_an_exit_code_is_what_the_agent_says_and_not_what_a_test_prints(
    printed: str, passed: bool | None
) -> None:
    assert has_passed(Call(0, "bash", "{}", printed)) is passed


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (
            "No, use AIzaSyB1c2D3e4F5g6H7i8J9k0L1m2N3o4P5q6x please",
            "No, use [secret:gcp-api-key] please",
        ),
        ("No, x7!kPq2zz is the old one", "No, [secret:password] is the old one"),
        ("No, " + "very " * 20, ("No, " + "very " * 20)[:40]),
    ],
)
def test_a_quotation_is_masked_before_it_is_cut(said: str, shown: str) -> None:
    """The second is a secret by what a command has printed."""
    made = talk(("cat .env", "DB_PASSWORD=x7!kPq2zz\n")).user(said).answer("Yes.")
    (line,) = judged(seen(made), [Corrections()]).findings
    assert line["why"] == f"corrected: {shown!r}"


@pytest.mark.parametrize(
    ("said", "sign"),
    [
        ("No, use git mv instead.", -1.0),
        ("[Request interrupted by user]", -1.0),
        ("That's wrong.", -1.0),
        ("Fix the tests!", -1.0),
        ("Thanks, perfect.", 1.0),
        ("<system-reminder>no</system-reminder>Now the docs", None),
        ("Now write the documentation of the second module", None),
        ("Nothing else is missing; now commit", None),
    ],
)
def test_what_the_user_says_next_is_about_the_answer_before(said: str, sign: float | None) -> None:
    made = talk().user(said).answer("Yes.")
    assert findings(Corrections(), seen(made)) == ([] if sign is None else [(sign, 0)])


def test_a_call_that_fails_by_the_agents_own_fault_is_about_its_turn() -> None:
    made = talk(
        ("ls", ran(0)),
        ("gti status", "bash: gti: command not found"),
        ("pytest", ran(1)),
    )
    made.user("x").answer(call=("Edit", "{broken"))
    assert findings(Failures(), seen(made)) == [(-1.0, 1), (-1.0, 4)]


def repository(folder: Path) -> Any:
    folder.mkdir()

    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q", "-b", "main")
    (folder / "a.py").write_text("one\n")
    git("add", "-A")
    git("commit", "-qm", "begin", "--date=@100 +0000")
    return git


@pytest.mark.parametrize(("reverts", "sign"), [(False, 1.0), (True, -1.0)])
def test_commits_are_good_if_they_are_kept(tmp_path: Path, reverts: bool, sign: float) -> None:
    git = repository(tmp_path / "r")
    (tmp_path / "r" / "a.py").write_text("two\n")
    git("commit", "-qam", "agent", "--date=@1005 +0000")
    if reverts:
        git("revert", "--no-edit", "HEAD")
    made = seen(talk(("git commit -qam agent", ran(0))), metadata={"folder": str(tmp_path / "r")})
    assert findings(Kept(after_s=100), made) == [(sign, None)]
    later = Seen(made.session, made.turns, now=1020.0)
    assert not is_due(later, [Kept(after_s=100)])
    assert findings(Kept(after_s=100), later) == []


def test_a_commit_of_the_person_is_no_evidence(tmp_path: Path) -> None:
    git = repository(tmp_path / "r")
    (tmp_path / "r" / "a.py").write_text("two\n")
    git("commit", "-qam", "by hand", "--date=@1005 +0000")
    made = seen(talk(("git commit -qam agent", ran(1))), metadata={"folder": str(tmp_path / "r")})
    assert findings(Kept(after_s=0), made) == []


def test_what_a_person_said_is_final(tmp_path: Path) -> None:
    git = repository(tmp_path / "r")
    (tmp_path / "r" / "a.py").write_text("two\n")
    git("commit", "-qam", "agent", "--date=@1005 +0000")
    where = {"folder": str(tmp_path / "r")}
    sources = (Kept(after_s=0), Rating())
    made = talk(("git commit -qam agent", ran(0)))
    for rating, value in ((0.0, -1.0), (1.0, 1.0), (0.5, 1.0), (None, 1.0)):
        found = judged(seen(made, rating=rating, metadata=where), sources)
        assert found.value == value
        assert any(each["source"] == "kept" for each in found.findings)


def test_a_commit_that_was_reset_away_is_not_kept(tmp_path: Path) -> None:
    git = repository(tmp_path / "r")
    (tmp_path / "r" / "a.py").write_text("two\n")
    git("commit", "-qam", "agent", "--date=@1005 +0000")
    git("reset", "-q", "--hard", "HEAD~1")
    made = seen(talk(("git commit -qam agent", ran(0))), metadata={"folder": str(tmp_path / "r")})
    assert findings(Kept(after_s=0), made) == [(-1.0, None)]


def test_edits_are_good_if_their_lines_are_at_head(tmp_path: Path) -> None:
    git = repository(tmp_path / "r")
    (tmp_path / "r" / "a.py").write_text("one\nkept = 1\nalso = 2\n")
    git("commit", "-qam", "person", "--date=@9000 +0000")

    def edits(text: str, path: str = "a.py") -> list[tuple[float, int | None]]:
        call = ("Edit", {"file_path": path, "old_string": "x", "new_string": text})
        made = Conversation("s").user("x").answer(call=call).result("ok").answer("Done.")
        return findings(Kept(after_s=0), seen(made, metadata={"folder": str(tmp_path / "r")}))

    assert edits("kept = 1\n  also = 2") == [(1.0, None)]
    assert edits("gone = 1\nlost = 2\nkept = 1") == [(-1.0, None)]
    assert edits("kept = 1", "missing.py") == [(-1.0, None)]
    assert edits("kept = 1", "/etc/passwd") == []
    assert findings(Kept(after_s=0), seen(talk(), metadata={"folder": "/nowhere"})) == []


def test_a_path_is_relative_to_the_folder_of_the_session(tmp_path: Path) -> None:
    git = repository(tmp_path / "r")
    web = tmp_path / "r" / "web"
    web.mkdir()
    (web / "a.ts").write_text("export const a = 1;\n")
    git("add", "-A")
    git("commit", "-qm", "x")
    for path, signs in (("a.ts", [1.0]), (str(web / "a.ts"), [1.0]), ("../web/a.ts", [1.0])):
        call = ("write", {"path": path, "content": "export const a = 1;\n"})
        made = Conversation("s").user("Do it.").answer(call=call).result("ok").answer("Done.")
        found = seen(made, 1e9, metadata={"folder": str(web)})
        assert [sign for sign, _ in findings(Kept(), found)] == signs


def test_a_repository_cannot_make_the_learner_run_a_program(tmp_path: Path) -> None:
    git = repository(tmp_path / "r")
    for name in ("core.fsmonitor", "diff.external", "core.pager", "diff.x.textconv"):
        git("config", name, f"touch {tmp_path}/ran")
    (tmp_path / "r" / ".gitattributes").write_text("* diff=x\n")
    call = ("Edit", {"file_path": "a.py", "old_string": "x", "new_string": "one"})
    made = Conversation("s").user("x").answer(call=call).result("ok")
    made.answer(call=("bash", {"command": "git commit -m x"})).result("ok").answer("Done.")
    found = findings(Kept(after_s=0), seen(made, metadata={"folder": str(tmp_path / "r")}))
    assert found == [(1.0, None)]
    assert not (tmp_path / "ran").exists()


def test_a_turn_has_the_weighted_sum_within_bounds_and_none_without_evidence() -> None:
    made = talk(("gti", "bash: gti: command not found"))
    sources = (Rating(weight=0.5), Failures(weight=0.25))
    found = judged(seen(made, rating=1.0), sources)
    assert found.value == 0.5
    assert found.turns == {0: 0.25, 1: 0.5}
    assert found.text.startswith("+0.50: rated 1 (rating +0.50); bash: command not found")
    assert judged(seen(made), (Failures(),)).turns == {0: -0.25}
    nothing = judged(seen(talk()), sources)
    assert not nothing.trains
    assert nothing.text == "not trained: no evidence"
    assert judged(seen(made, rating=0.0), (Rating(weight=3.0),)).turns == {0: -1.0, 1: -1.0}


def test_an_unanswered_turn_has_no_value() -> None:
    made = Conversation("s").user("x").answer("a", status=TurnStatus.CUT).answer("b")
    assert judged(seen(made, rating=1.0), (Rating(),)).turns == {1: 1.0}


def test_a_session_that_is_rated_waits_for_no_other_source() -> None:
    made = talk(("git commit -qm x", ""))
    sources = (Kept(after_s=10_000), Rating())
    assert not is_due(seen(made), sources)
    assert not is_due(seen(made, rating=0.5), sources)
    assert is_due(seen(made, rating=1.0), sources)


@pytest.mark.parametrize("cause", ["rule", "itself"])
def test_a_session_with_a_mark_or_that_rates_itself_teaches_nothing_good(cause: str) -> None:
    command = "agentic-proxy sessions rate this up" if cause == "itself" else "ls"
    marks = [Mark("edits-tests", RuleAction.MARK, 0, 1.0)] if cause == "rule" else []
    good = judged(seen(talk((command, "")), rating=1.0, marks=marks), (Rating(),))
    assert not good.trains
    assert good.barred in good.text
    bad = judged(seen(talk((command, "")), rating=0.0, marks=marks), (Rating(),))
    assert bad.value == -1.0
