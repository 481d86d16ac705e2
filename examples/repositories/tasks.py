"""The tasks: changes to small repositories of Python files, and whether one is done.

This module imports only the standard library, because the verifier, a separate program, uses it.
Invariant: no code of the repository is run, because an agent wrote it; what its functions return
is worked out from their source.
"""

from __future__ import annotations

import ast
import operator
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).with_name("folders")
FILES = ("shop", "cart", "stock", "bills", "rooms", "teams", "trips", "books", "notes", "parts")
FUNCTIONS = (
    *("total", "change", "amount", "score", "balance", "width", "weight", "profit", "margin"),
    *("height", "volume", "speed", "credit", "gain", "rest", "share"),
)
NEW_NAMES = ("compute", "measure", "combine", "outcome", "value", "figure", "answer", "derive")
PARAMETERS = (
    *(("price", "tax"), ("left", "right"), ("first", "second"), ("old", "new")),
    *(("cost", "fee"), ("start", "end"), ("top", "base"), ("one", "other")),
)
CONSTANTS = ("COLOR", "FRAME", "COVER", "STYLE", "TITLE", "LABEL", "PAINT", "METAL")
WORDS = ("amber", "brass", "coral", "ebony", "ivory", "jade", "pearl", "silver")
"""Values of the constants."""
OPERATORS: Mapping[str, tuple[str, Callable[[int, int], int]]] = {
    "sum": ("+", operator.add),
    "difference": ("-", operator.sub),
    "product": ("*", operator.mul),
}
REQUESTS: Mapping[str, str] = {
    "fix": "The function {function} in {file}.py must return the {wanted} of its numbers. Fix it.",
    "rename": "Rename the function {function} in {file}.py to {wanted}.",
    "set": "Set {function} in {file}.py to {wanted}.",
    "find": "Write the name of the file that defines {function} into answer.txt.",
}
"""`{function}` is a constant in `set`, and `{wanted}` what it is to become."""
PROBES = ((7, 3), (5, 8), (2, 9))
"""Numbers with which sum, difference and product differ."""


@dataclass(frozen=True)
class File:
    """One file of a repository: `constant = "word"`, and a function of two numbers."""

    name: str
    constant: str
    word: str
    function: str
    parameters: tuple[str, str]
    operator: str

    @property
    def text(self) -> str:
        left, right = self.parameters
        return (
            f'{self.constant} = "{self.word}"\n\n\n'
            f"def {self.function}({left}, {right}):\n    return {left} {self.operator} {right}\n"
        )


def new_repository(rng: random.Random) -> list[File]:
    """Three files whose functions, parameters and constants have different names."""
    return [
        File(name, constant, word, function, parameters, rng.choice("+-*"))
        for name, constant, word, function, parameters in zip(
            rng.sample(FILES, 3),
            rng.sample(CONSTANTS, 3),
            rng.sample(WORDS, 3),
            rng.sample(FUNCTIONS, 3),
            rng.sample(PARAMETERS, 3),
            strict=True,
        )
    ]


def new_task(rng: random.Random, repository: list[File]) -> dict[str, str]:
    """A task's data: its `kind`, what it is about, and the `prompt`. It is never done yet."""
    file, kind = rng.choice(repository), rng.choice(list(REQUESTS))
    function = file.constant if kind == "set" else file.function
    wanted = {
        "fix": rng.choice([word for word, (sign, _) in OPERATORS.items() if sign != file.operator]),
        "rename": rng.choice(NEW_NAMES),
        "set": rng.choice([word for word in WORDS if word != file.word]),
        "find": f"{file.name}.py",
    }[kind]
    prompt = REQUESTS[kind].format(function=function, file=file.name, wanted=wanted)
    return {
        "prompt": prompt,
        "kind": kind,
        "file": file.name,
        "function": function,
        "wanted": wanted,
    }


def is_done(folder: Path, original: Path, task: Mapping[str, str]) -> bool:
    """Whether `folder`, which began as a copy of `original`, has the outcome of the task, and is
    otherwise as it was. Raises FileNotFoundError: `original` cannot be read."""
    before, after = _contents(original), _contents(folder)
    if not before:
        raise FileNotFoundError(f"{original} has no Python files of a task")
    if after is None or before.keys() != after.keys():
        return False
    expected = dict(before)
    name, kind, wanted = task["file"], task["kind"], task["wanted"]
    definitions = dict(expected[name])
    if kind == "fix":
        results = tuple(OPERATORS[wanted][1](*probe) for probe in PROBES)
        definitions[task["function"]] = results
    elif kind == "set":
        definitions[task["function"]] = wanted
    elif kind == "rename":
        definitions[wanted] = definitions.pop(task["function"])
    else:
        answer = folder / "answer.txt"
        return after == before and answer.is_file() and _first_words(answer) == [wanted]
    return after == {**expected, name: definitions}


def _first_words(file: Path) -> list[str]:
    with file.open(encoding="utf-8", errors="replace") as text:
        return text.read(200).split()


def _contents(folder: Path) -> dict[str, dict[str, object]] | None:
    """For each file its definitions; None if a file is not of the form of `File.text`."""
    found: dict[str, dict[str, object]] = {}
    for file in sorted(folder.glob("*.py")):
        try:
            found[file.stem] = _definitions(file.read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError, KeyError, TypeError, RecursionError):
            return None
    return found


def _definitions(text: str) -> dict[str, object]:
    """The word of each constant, and of each function its results for `PROBES`."""
    found: dict[str, object] = {}
    for node in ast.parse(text).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(word))):
                found[name] = word
            case ast.FunctionDef(name=name, decorator_list=[], body=[ast.Return(value=value)]):
                names = [argument.arg for argument in node.args.args]
                found[name] = tuple(
                    _result(value, dict(zip(names, probe, strict=True))) for probe in PROBES
                )
            case _:
                raise ValueError(f"neither a constant nor a function: {ast.unparse(node)[:80]}")
    return found


_SIGNS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def _result(node: ast.expr | None, numbers: Mapping[str, int]) -> int:
    match node:
        case ast.Name(id=name):
            return numbers[name]
        case ast.Constant(value=int(number)):
            return number
        case ast.BinOp(left=left, op=sign, right=right):
            result: int = _SIGNS[type(sign)](_result(left, numbers), _result(right, numbers))
            return result
    raise ValueError("not a sum, difference or product")
