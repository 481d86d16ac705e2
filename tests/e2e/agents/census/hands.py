"""How each agent's tools read, write and edit files, and the day's work in terms of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.e2e.agents.census.policy import SUB_TASK, Call, Step

TEXT = "\n  def f():\n\treturn '  é 😀 数学 <b>&amp;</b> \\n'\n\n\n"
"""Begins and ends with line ends, and has a tab, a double blank, and a backslash."""
EDITS = (
    ("  def f():\n\treturn", "def f():\n    return"),
    ("é 😀", '"é"\t123'),
    ("\n\n\n", "\n"),
)
UNKNOWN = Step((("no_such_tool", {"a": " b "}),))
"""A call of a tool that is not offered."""
BLANKS = "trailing blanks  \n\tand a tab\t\n  "


@dataclass(frozen=True, slots=True)
class Hands:
    """Paths are absolute. `read` is also used for pictures and documents."""

    shell: Callable[[str], Call]
    read: Callable[[str], Call]
    write: Callable[[str, str], Call]
    edit: Callable[[str, str, str], Call]

    @classmethod
    def of_shell(cls, shell: Callable[[str], Call]) -> Hands:
        """For agents that have a shell only."""
        return cls(
            shell,
            lambda path: shell(f"head -c 2000 '{path}'"),
            lambda path, text: shell(f"cat > '{path}' <<'END'\n{text.removesuffix(chr(10))}\nEND"),
            lambda path, old, new: shell(
                f"python3 - <<'END'\nfrom pathlib import Path\nfile = Path({path!r})\n"
                f"file.write_text(file.read_text().replace({old!r}, {new!r}, 1))\nEND"
            ),
        )


def work(hands: Hands, workspace: str) -> list[Step]:
    """A file is written and edited, pictures and documents are read; two calls at once, failing
    calls, and a long output."""
    file, text = f"{workspace}/a.py", TEXT
    steps = [Step((hands.write(file, text),), files={"a.py": text}), Step((hands.read(file),))]
    for old, new in EDITS:
        text = text.replace(old, new, 1)
        steps.append(Step((hands.edit(file, old, new),), files={"a.py": text}))
    return [
        *steps,
        Step((hands.write(f"{workspace}/blanks.txt", BLANKS),)),
        Step((hands.edit(file, "not in the file", "any"),)),
        Step((hands.read(f"{workspace}/none.txt"),)),
        Step((hands.shell("echo '  é 😀 \"q\" $HOME' ; exit 3"),), text="This one fails:  é"),
        Step((hands.shell("printf ' one\\n' > one.txt"), hands.read(f"{workspace}/notes.txt"))),
        Step((hands.shell("seq 1 6000"),)),
        Step((hands.read(f"{workspace}/long.txt"),)),
        Step((hands.read(f"{workspace}/picture.png"),)),
        Step((hands.read(f"{workspace}/paper.pdf"),)),
    ]


def later(hands: Hands, workspace: str, part: int) -> list[Step]:
    """What is done after the session was resumed."""
    name = f"part{part}.txt"
    return [
        Step((hands.shell(f"printf '  {part}\\n\\n' > {name}"),), files={name: f"  {part}\n\n"}),
        Step((hands.read(f"{workspace}/{name}"), hands.shell("cat notes.txt"))),
    ]


def delegated(
    tool: str, *each: Mapping[str, Any], prompt: str = "prompt", task: str = ""
) -> list[Step]:
    """A sub-agent, then two or more at once. `each` are their other arguments; `task` tells their
    prompts from those of others."""

    def call(name: str, arguments: Mapping[str, Any]) -> Call:
        return (tool, {**arguments, prompt: f"{SUB_TASK} {name}{task}: write it down.  é 😀"})

    one, *others = (*each, *each[-1:])
    both: Sequence[Call] = tuple(call(f"n{at}", each) for at, each in enumerate(others))
    return [Step((call("ONE", one),)), Step((call("TWO", one), *both))]
