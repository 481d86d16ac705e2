"""Every command that a verdict gives can be pasted: its words are those of the command line.

They may name `trainer.extras.sft` and `trainer.extras.report`."""

from __future__ import annotations

import random
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from proxy.cli import _parser as proxy_parser
from proxy.machine.secrecy import flat_config
from proxy.run_files.evidence import RunRecord
from proxy.run_files.verdict import RunVerdict
from tests.proxy.run_files.test_verdict import GROUPS, SIZE, sampled, write
from trainer.commands.arguments import COMMANDS
from trainer.settings.sources import dump, load

Steps = list[list[list[float | None]]]
RNG = random.Random(0)
COURSES: dict[str, tuple[Callable[[], Steps], str]] = {
    "too hard": (lambda: [[[0.0] * SIZE] * GROUPS] * 3, "done"),
    "already solved": (lambda: [[[1.0] * SIZE] * GROUPS] * 3, "done"),
    "not separating": (lambda: [[[float(g % 2)] * SIZE for g in range(GROUPS)]] * 20, "done"),
    "collapsed": (lambda: [sampled(RNG, p) for p in [0.9] * 12 + [0.05] * 12], "done"),
    "learning": (lambda: [sampled(RNG, n / 30) for n in range(30)], "done"),
    "failing": (lambda: [[[None] * SIZE] * GROUPS], "failed"),
    "starved": (lambda: [[[None] * SIZE] * GROUPS], "failed"),
    "too early": (lambda: [sampled(RNG, 0.5)], "stopped"),
    "too early, done": (lambda: [sampled(RNG, 0.5)], "done"),
}


@pytest.mark.parametrize("word", COURSES)
def test_the_commands_of_a_verdict_are_valid(word: str, checkpoint: Path, tmp_path: Path) -> None:
    course, status = COURSES[word]
    lost = "EngineError: engine-0 did not answer" if word == "starved" else "exit code 2"
    folder = write(tmp_path / "a run", course(), error=lost)
    given = tmp_path / "given.yaml"
    agent = {"command": {"argv": ["true"]}}
    given.write_text(yaml.safe_dump({"model": {"path": str(checkpoint)}, "remote_agent": agent}))
    text = dump(load([given]))
    (folder / "config.yaml").write_text(text)
    (tmp_path / "FOLDER").symlink_to(checkpoint)
    config = dict(flat_config(yaml.safe_load(text)))
    evidence = RunRecord(folder, 1.0).read()
    found = RunVerdict(folder, evidence, {"status": status}, config).json()
    assert found["verdict"] == word.partition(",")[0]
    assert found["next"]
    for each in found["next"]:
        check(each["command"].replace("model.path=FOLDER", f"model.path={tmp_path}/FOLDER"))


def check(command: str) -> None:
    program, first, *rest = shlex.split(command)
    if program == "agentic-proxy":
        proxy_parser().parse_args([first, *rest])
        return
    if program in ("less", "tail"):
        return
    assert program == "agentic-train"
    if first in ("report", "resume"):
        run, *words = rest
        load([Path(run) / "config.yaml"], words)
        return
    if first == "--config":
        load([Path(rest[0])], rest[1:])
        return
    arguments = COMMANDS[first].parser(first).parse_args(rest)
    if first in ("collect", "sft"):
        load(arguments.config, [*(["sft={}"] if first == "sft" else []), *arguments.words])
