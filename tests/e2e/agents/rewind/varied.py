"""Varied trials for any agent: what the model of the scripted engine does in each of its turns.

A trial is drawn from a seed and its number, so that every agent does the same work: with its own
tools where it has them, else by shell commands. Invariant: what the commands print and write
depends on nothing but times, durations, process ids, temporary paths, addresses, unique ids and
the ids of commits.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from proxy.testing.scripted_engine import Fault

Command = Callable[[Random, str], str]
"""A command that a name tells apart from others of its trial."""


@dataclass(frozen=True, slots=True)
class Shell:
    command: str


@dataclass(frozen=True, slots=True)
class WriteFile:
    path: str
    text: str

    @property
    def command(self) -> str:
        return f"cat > {self.path} <<'END'\n{self.text}END"


@dataclass(frozen=True, slots=True)
class ReadFile:
    path: str

    @property
    def command(self) -> str:
        return f"cat {self.path}"


@dataclass(frozen=True, slots=True)
class EditFile:
    path: str
    old: str
    new: str

    @property
    def command(self) -> str:
        return f"sed -i s/{self.old}/{self.new}/ {self.path}"


Action = Shell | WriteFile | ReadFile | EditFile


@dataclass(frozen=True, slots=True)
class Step:
    """One answer of the model: its tool calls, and how the first answer fails."""

    actions: tuple[Action, ...]
    fault: Fault | None = None


@dataclass(frozen=True, slots=True)
class VariedTrial:
    number: int
    steps: tuple[Step, ...]


def _python(code: str) -> str:
    return f"python3 -c {shlex.quote(code)}"


COMMANDS: dict[str, Command] = {
    "files": lambda r, n: f"mkdir -p {n}; for i in 1 2 3; do echo {n} $i > {n}/$i.txt; done",
    "listing": lambda _, n: f"date; mkdir -p {n}; ls -l; ls -la {n}",
    "find": lambda _r, _n: "pwd; find . -type f -not -path './.git/*' | sort",
    "stamp": lambda _, n: f"date -u +%Y-%m-%dT%H:%M:%SZ > {n}.txt; cat {n}.txt",
    "log": lambda _, n: f"touch {n}-$(date +%Y%m%d-%H%M%S).log; ls {n}-*",
    "dates": lambda _r, _n: "date; date -R; date +%s; date +%s%N; date -Iseconds",
    "pid": lambda _r, _n: "echo pid $$",
    "temporary": lambda _r, _n: "mktemp -d; mktemp",
    "tempfile": lambda _r, _n: _python("import tempfile; print(tempfile.mkdtemp())"),
    "numbers": lambda r, n: f"seq 1 {r.randint(5, 90)} > {n}.txt; wc -l {n}.txt; tail -2 {n}.txt",
    "took": lambda _r, _n: _python('import time; print(f"took {time.perf_counter() % 1:.6f} s")'),
    "timed": lambda _r, _n: "bash -c 'time sleep 0.05'",
    "lines": lambda r, _: f'for i in $(seq {r.randint(3, 30)}); do echo "line $i: $((i*i))"; done',
    "unicode": lambda _, n: f"printf 'Ko\u0308ln 😀 数学 ñ “{n}”\\n' | tee {n}.txt",
    "colours": lambda _, n: f"printf '\\033[31mred {n}\\033[0m\\n\\tindented\\n'",
    "missing": lambda _, n: f"cat {n}-missing.txt",
    "exit": lambda r, n: f"echo {n} fails; sh -c 'exit {r.randint(1, 99)}'",
    "raises": lambda _, n: _python(f'raise ValueError("{n}")'),
    "silent": lambda _, n: f"touch {n}.txt",
    "streams": lambda _, n: f"echo {n} out; sleep 0.1; echo {n} err >&2",
    "large": lambda r, _: f"seq 1 {r.randint(9000, 15000)}",
    "wide": lambda r, n: _python(f'print("{n} " * {r.randint(9000, 15000)})'),
    "waited": lambda _, n: f"(sleep 0.2; echo {n} > {n}.txt) & wait; cat {n}.txt",
    "background": lambda _r, _n: 'sleep 20 > /dev/null 2>&1 & echo "pid $!"',
    "address": lambda _r, _n: _python("print(object())"),
    "unique": lambda _r, _n: _python("import uuid; print(uuid.uuid4())"),
    "stat": lambda _, n: f"echo {n} > {n}.txt; stat {n}.txt",
    "machine": lambda _r, _n: "uname -a; nproc; id -un",
    "commit": lambda _, n: (
        f"test -d .git || git init -q -b main .; echo {n} > {n}.txt; git add {n}.txt; "
        f"git -c user.name=A -c user.email=a@b.c commit -m 'Add {n}'; git log"
    ),
    "tests": lambda _, n: (
        f"printf 'import unittest\\nclass T(unittest.TestCase):\\n"
        f"    def test_a(self): self.assertEqual(1, 1)\\n' > test_{n}.py; "
        f"python3 -B -m unittest test_{n}"
    ),
    "deep": lambda _, n: f"mkdir -p {n}/a/b/c; echo {n} > {n}/a/b/c/d.txt; find {n} | sort",
    "copy": lambda _, n: f"echo {n} > {n}.txt; cp {n}.txt {n}-2.txt; sha256sum {n}*.txt",
}
_ALONE = ("large", "wide", "background", "commit", "find", "listing")
"""Not among calls at once: they would print what another call writes, or are too long."""
_WORDS = ("amber", "birch", "cedar", "dune", "ember", "fjord", "grove", "heath", "islet", "jade")
MIN_STEPS, MAX_STEPS = 7, 13
"""With the last answer, without a call, a trial has 8 to 14 turns."""


def varied_trial(seed: int, number: int, *, faults: bool = True) -> VariedTrial:
    """The trial `number`; `faults`: some of its answers are cut, or fail, when first sampled."""
    random = Random(f"{seed}-{number}")
    size = random.randint(MIN_STEPS, MAX_STEPS)
    steps = [Step((Shell("echo hi > out.txt"),))]
    while len(steps) < size:
        name = f"{random.choice(_WORDS)}{len(steps)}"
        if size - len(steps) >= 3 and random.random() < 0.2:
            steps += _edited(name)
        elif random.random() < 0.25:
            steps.append(_at_once(random, name))
        else:
            steps.append(Step((_drawn(random, name, tuple(COMMANDS)),)))
    if faults and random.random() < 0.4:
        at = random.randrange(1, size)
        fault = random.choice([Fault("die", random.randint(1, 8)), Fault("error")])
        steps[at] = Step(steps[at].actions, fault)
    return VariedTrial(number, tuple(steps))


def _drawn(random: Random, name: str, kinds: tuple[str, ...]) -> Shell:
    return Shell(COMMANDS[random.choice(kinds)](random, name))


def _at_once(random: Random, name: str) -> Step:
    """Several calls in one answer."""
    kinds = tuple(kind for kind in COMMANDS if kind not in _ALONE)
    count = random.randint(2, 3)
    return Step(tuple(_drawn(random, f"{name}{part}", kinds) for part in "abc"[:count]))


def _edited(name: str) -> list[Step]:
    """A file is written, read and edited, in one answer each."""
    path = f"{name}.md"
    text = f"# {name}\nThe colour is green.\nThe end.\n"
    edits = (WriteFile(path, text), ReadFile(path), EditFile(path, "green", "blue"))
    return [Step((edit,)) for edit in edits]
