"""The files of a trial's folder are read by pieces, and nothing else is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from proxy.run_files.trial_files import AGENT_FILES, TrialFiles


@pytest.mark.parametrize("most", [5, 7, 64])
def test_pieces_of_a_file_give_it_whole_and_cut_no_character(tmp_path: Path, most: int) -> None:
    text = "one é two 漢字 three 🙂🙂 four"
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "agent.log").write_text(text)
    files = TrialFiles(tmp_path, "t")
    read, end = "", None
    while end != 0:
        piece = files.before("agent.log", end, most)
        assert piece is not None
        assert piece["bytes"] == len(text.encode())
        assert end is None or piece["from"] < end
        read, end = piece["text"] + read, piece["from"]
    assert read == text


def test_bytes_that_are_no_text_are_read_to_the_beginning(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "agent.log").write_bytes(b"\x80" * 50)
    files, end = TrialFiles(tmp_path, "t"), 50
    for _ in range(10):
        piece = files.before("agent.log", end, 5)
        assert piece is not None
        end = piece["from"]
    assert end == 0


def test_no_link_pipe_or_foreign_name_is_read(tmp_path: Path) -> None:
    trials = tmp_path / "trials"
    (trials / "t" / "reward").mkdir(parents=True)
    (tmp_path / "agent.log").write_text("outside")
    (trials / "agent.log").write_text("outside")
    (trials / "t" / "task.json").write_text("the agent's key")
    (trials / "linked").symlink_to(tmp_path)
    (trials / "t" / "grader.log").symlink_to(tmp_path / "agent.log")
    os.mkfifo(trials / "t" / "verifier.log")
    (trials / "t" / "graded.json").mkdir()
    names = ("agent.log", "grader.log", "verifier.log", "graded.json", "task.json", "../agent.log")
    assert TrialFiles(trials, "t").ends(names) == []
    for trial in ("linked", "..", ".", "", "t/../..", "\ud800", "a\0b", "none"):
        assert TrialFiles(trials, trial).ends(AGENT_FILES) == []


def test_last_words_are_those_of_the_program_that_failed(tmp_path: Path) -> None:
    files = TrialFiles(tmp_path, "t")
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "agent.log").write_text("I pressed 2,2.\n")
    assert files.last_words("RewardError: exit code 1") == "I pressed 2,2."
    (tmp_path / "t" / "grader.log").write_text("KeyError: 'content'\n")
    assert files.last_words("RewardError: exit code 1") == "KeyError: 'content'"
    assert files.last_words("AgentError: exit code 1") == "I pressed 2,2."
