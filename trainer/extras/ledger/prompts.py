"""`agentic-train same-prompts RUN RUN`: what differs between the prompts of two equal runs.

Turns are compared by trial (its seed) and number, as text. What differs is named by its form: a
time, a random id, a folder, a number; and by the words before it. Invariant: two runs without a
finding have given the model the same tokens in every turn that both have.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher
from pathlib import Path

import yaml

from proxy.records import Ids
from proxy.records.images import decoded
from proxy.rendering.tokenizer import load_tokenizer
from proxy.store import open_store
from trainer.commands.runs import reporting
from trainer.extras.ledger.ledger import read_lines, steps_in
from trainer.run.folder import RunFolder

FORMS = {
    "image": re.compile(r"\[image [0-9a-f]{8}, \d+ tokens\]"),
    "date": re.compile(r"\d{4}-\d{2}-\d{2}|\d{1,2}/\d{1,2}/\d{2,4}|[A-Z][a-z]{2} +\d{1,2},? \d{4}"),
    "time": re.compile(r"\d{1,2}:\d{2}(:\d{2})?"),
    "random id": re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]+|[0-9a-f]{8,}|call_\w+|toolu_\w+"),
    "folder": re.compile(r"(/[\w.-]+){2,}"),
    "process id or number": re.compile(r"\d+"),
}
"""In the order in which they are tried, on the words around what differs."""
AROUND = 40
"""Characters before a difference that are shown."""
WORD = re.compile(r"\S*$"), re.compile(r"^\S*")


def main(arguments: argparse.Namespace) -> int:
    """Runs `agentic-train same-prompts`; returns its exit code: 1 if something differs."""
    return reporting("agentic-train same-prompts", lambda: asyncio.run(_compare(*arguments.runs)))


async def _compare(one: Path, other: Path) -> int:
    first, second = await prompts_of(RunFolder.open(one)), await prompts_of(RunFolder.open(other))
    config = yaml.safe_load(RunFolder.open(one).config.read_text(encoding="utf-8"))
    tokenizer = load_tokenizer(Path(config["model"]["path"]))
    found: Counter[str] = Counter()
    examples: dict[str, str] = {}
    diverged: set[int] = set()
    for (seed, turn), ids in sorted(first.items()):
        theirs = second.get((seed, turn))
        if theirs is None or seed in diverged or ids.tobytes() == theirs.tobytes():
            continue
        diverged.add(seed)  # the answers differ from here on, and so do later prompts
        texts = (decoded(each, tokenizer.decode) for each in (ids, theirs))
        for name, example in differences(*texts):
            found[name] += 1
            examples.setdefault(name, f"seed {seed}, turn {turn}: {example}")
    for name, count in found.most_common():
        print(f"{count} times {name}: {examples[name]}")
    same = len(first.keys() & second.keys())
    print(f"{same} turns in both runs; {len(diverged)} trials have a prompt that differs")
    return 1 if diverged else 0


async def prompts_of(folder: RunFolder) -> Mapping[tuple[int, int], Ids]:
    """`(seed of a trial, turn)` → the ids that the turn added to its prompt."""
    trials = {
        trial["trial"]: trial["seed"]
        for line in steps_in(read_lines(folder.ledger))
        for group in line["groups"]
        for trial in group["trials"]
    }
    found = {}
    store = await open_store(str(folder.sessions), create=False)
    try:
        for trial, seed in trials.items():
            for turn in await store.get_turns(trial):
                found[seed, turn.index] = turn.prompt_ids
    finally:
        await store.close()
    return found


def differences(one: str, other: str) -> Iterator[tuple[str, str]]:
    """The name of each place in which two prompts differ, and the words around it."""
    for tag, start, end, from_, to in SequenceMatcher(
        None, one.split(" "), other.split(" "), autojunk=False
    ).get_opcodes():
        if tag == "equal":
            continue
        words, others = one.split(" "), other.split(" ")
        ours, theirs = " ".join(words[start:end]), " ".join(others[from_:to])
        before = " ".join(words[max(0, start - 6) : start])[-AROUND:]
        yield form(ours, theirs), f"{before!r} then {ours!r} and {theirs!r}"


def form(ours: str, theirs: str) -> str:
    """What two different pieces of text are."""
    for name, pattern in FORMS.items():
        left, right = pattern.sub("*", ours), pattern.sub("*", theirs)
        if left == right and left != ours:
            return name
    return "other text"
