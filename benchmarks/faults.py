"""Twelve faults that cost others weeks, each put into our own source: who notices, when, and how.

    python -m benchmarks.faults                            all, one after the other
    python -m benchmarks.faults --only stale_weights off_by_one_mask

A fault is an edit of a copy of the source at the place where the mistake would be made; it touches
no check. The quickstart then trains there for a few steps, with a real vLLM, and if it ends without
a word, the commands that a user has for it are run: `audit`, and `replay --engines`. The table says
how many steps were done by then, and what was said. Exits with 1 if a fault was silent that is not
said to be.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("proxy", "agent_loop", "trainer", "harbor_sdk", "examples")
STEPS = 3
LIMIT_S = 900
SETTINGS = (
    f"trainer.steps={STEPS}",
    "rollout.groups_per_step=2",
    "optimizer.warmup_steps=0",
    "data.val_files=[]",
)


@dataclass(frozen=True, slots=True)
class Edit:
    """Replaces `old`, which stands once in `file`, by `new`."""

    file: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Fault:
    """Example: Fault("stale_weights", "…", (Edit(…),))"""

    name: str
    what: str
    edits: tuple[Edit, ...]
    config: tuple[str, ...] = ("agentic_trainer.yaml",)
    settings: tuple[str, ...] = ()
    silent: str = ""
    """Why no record can show it, for a fault that is not noticed; empty: it must be."""


FAULTS = (
    Fault(
        "none",
        "none: the source as it is",
        (),
        settings=("trainer.deterministic=true",),
        silent="as it must be",
    ),
    Fault(
        "stale_weights",
        "an update sends the weights of the update before, under the new version",
        (
            Edit(
                "trainer/weight_sync/sync.py",
                "        sent, described = self._as_sent(weights, shapes)",
                "        held = [(name, each.clone()) for name, each in weights]\n"
                '        weights, self._before = getattr(self, "_before", held), held\n'
                "        sent, described = self._as_sent(weights, shapes)",
            ),
        ),
    ),
    Fault(
        "stale_adapter",
        "each new adapter is loaded from the folder of the first one",
        (
            Edit(
                "trainer/weight_sync/control.py",
                'body = {"lora_name": name, "lora_path": str(folder)}',
                "import shutil\n"
                '            first = folder.parent / "first"\n'
                "            if not first.exists():\n"
                "                shutil.copytree(folder, first)\n"
                '            body = {"lora_name": name, "lora_path": str(first)}',
            ),
        ),
        config=("agentic_trainer.yaml", "examples/quickstart/adapter.yaml"),
    ),
    Fault(
        "lost_seed",
        "seeds of calls do not reach the engine",
        (
            Edit(
                "proxy/engines/vllm.py",
                'params["seed"] = s.seed',
                "pass",
            ),
        ),
        settings=("trainer.deterministic=true",),
    ),
    Fault(
        "retokenised_turn",
        "a turn is recorded as the tokens of its text, not as those that were sampled",
        (
            Edit(
                "proxy/serving/answer.py",
                "            sampled_ids=ids_of(self._ids),\n            logprobs=",
                "            sampled_ids=ids_of(_again(self, self._ids)),\n            logprobs=",
            ),
            Edit(
                "proxy/serving/answer.py",
                "from __future__ import annotations\n",
                "from __future__ import annotations\n\n\n"
                "def _again(answer, ids):\n"
                "    from tokenizers import Tokenizer\n"
                '    fast = Tokenizer.from_file("examples/quickstart/model/tokenizer.json")\n'
                "    words = [fast.id_to_token(i) for i in ids]\n"
                "    # another split of the same text: the first long word in two parts\n"
                "    for at, word in enumerate(words):\n"
                "        if word and len(word) > 2 and word.isalpha():\n"
                "            for cut in range(1, len(word)):\n"
                "                two = word[:cut], word[cut:]\n"
                "                parts = [fast.token_to_id(each) for each in two]\n"
                "                if None not in parts:\n"
                "                    return [*ids[:at], *parts, *ids[at + 1 :]]\n"
                "    return ids\n",
            ),
        ),
    ),
    Fault(
        "dropped_history",
        "the first call and its result are gone from the prompts of later turns",
        (
            Edit(
                "examples/quickstart/agent.py",
                "        answer = client.chat.completions.create(",
                "        if len(messages) > 5:\n"
                "            del messages[2:4]\n"
                "        answer = client.chat.completions.create(",
            ),
        ),
        silent="nothing wrong is trained: the path forks (`rollout/branches`), and each token"
        " is trained behind the prompt that it was sampled from",
    ),
    Fault(
        "masked_turn_counted",
        "the last three tokens of a prompt are trained as if they had been sampled",
        (
            Edit(
                "agent_loop/trajectory.py",
                "        mask[prompt:] = True\n",
                "        mask[max(prompt - 3, 0) :] = True\n",
            ),
        ),
    ),
    Fault(
        "wrong_temperature",
        "the engine samples at 1.2 times the temperature that was asked for",
        (
            Edit(
                "proxy/engines/vllm.py",
                '"temperature": s.temperature,',
                '"temperature": s.temperature * 1.2,',
            ),
        ),
    ),
    Fault(
        "kept_prefix_cache",
        "keys and values of the old weights stay in the engine across an update",
        (
            Edit(
                "trainer/weight_sync/sync.py",
                "        self.control.reset_caches()",
                "        pass",
            ),
        ),
    ),
    Fault(
        "failures_as_zero",
        "a fifth of the agents is killed, and that is an end like any other, with reward 0",
        (
            Edit(
                "examples/quickstart/agent.py",
                "    for _ in range(MAX_TURNS):\n",
                "    for turn in range(MAX_TURNS):\n"
                "        if turn == 1 and os.urandom(1)[0] < 51:\n"
                "            os.kill(os.getpid(), 9)\n",
            ),
            Edit(
                "agent_loop/launchers/agent_process.py",
                "end = AgentEnd.EXITED if ended.failure is None else AgentEnd.CRASHED",
                "end = AgentEnd.EXITED",
            ),
        ),
        silent="a launcher that calls a killed agent ended leaves a record like that of one that"
        " gave up: what it says of the end is all that is known of it",
    ),
    Fault(
        "duplicated_trial",
        "a trial stands twice in its group",
        (
            Edit(
                "agent_loop/producers/groups.py",
                'return Group(f"g{self.number}", self.task, tuple(rollouts))',
                'return Group(f"g{self.number}", self.task, (*rollouts[:-1], rollouts[0]))',
            ),
        ),
    ),
    Fault(
        "off_by_one_mask",
        "the mask and what belongs to it stand one token too early",
        (
            Edit(
                "agent_loop/trajectory.py",
                "    ids = np.concatenate([turn.prompt_ids, turn.sampled_ids])",
                "    mask, logprobs, versions = (\n"
                "        np.roll(each, -1) for each in (mask, logprobs, versions)\n"
                "    )\n"
                "    ids = np.concatenate([turn.prompt_ids, turn.sampled_ids])",
            ),
        ),
    ),
    Fault(
        "another_tokenizer",
        "the proxy reads and writes with another tokenizer of the same size",
        (
            Edit(
                "proxy/rendering/tokenizer.py",
                "fast = FastTokenizer.from_file(str(file))",
                'fast = FastTokenizer.from_file("examples/mini_swe_agent/model/tokenizer.json")',
            ),
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Found:
    """What happened: the command that spoke, the steps that were done by then, and what it said."""

    by: str
    steps: int
    said: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 1: a fault that must be noticed was silent."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--only", nargs="*", choices=[fault.name for fault in FAULTS])
    parser.add_argument("--out", type=Path, default=Path("runs/faults"))
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    silent = 0
    print("| fault | noticed by | steps done | what was said |\n|---|---|---|---|")
    for fault in FAULTS:
        if given.only and fault.name not in given.only:
            continue
        found = inject(fault, given.out.absolute() / fault.name)
        silent += found is None and not fault.silent
        row = (
            ("nobody", str(STEPS), fault.silent or "**silent**")
            if found is None
            else (found.by, str(found.steps), found.said)
        )
        print(f"| {fault.what} | {' | '.join(row)} |", flush=True)
    return int(silent > 0)


def inject(fault: Fault, out: Path) -> Found | None:
    """Trains a copy of the source that has the fault; its logs are in `out`. None: nothing was
    said."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in COPIED:
            shutil.copytree(
                ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
            )
        for name in ("agentic_trainer.yaml", "pyproject.toml"):
            shutil.copy(ROOT / name, copy / name)
        for edit in fault.edits:
            apply(edit, copy)
        run = out / "run"
        train = [f"--config={each}" for each in fault.config]
        train += [*SETTINGS, *fault.settings, f"trainer.run_dir={run}"]
        status = command(copy, train, out / "train.log")
        if status:
            return Found("the run ended", steps_of(run), last_error(out / "train.log"))
        if warning := warnings_of(out / "train.log"):
            return Found("a warning of the run", steps_of(run), warning)
        if "trainer.deterministic=true" not in fault.settings:
            return None  # no ledger
        # what follows is a user's own source, without the fault
        for check in (["audit", str(run)], ["replay", str(run), "--engines"]):
            log = out / f"{check[0]}.log"
            if command(ROOT, check, log):
                return Found(f"`agentic-train {check[0]}`", steps_of(run), last_error(log))
    return None


def apply(edit: Edit, copy: Path) -> None:
    """Raises ValueError: the text does not stand there once, because the source has changed."""
    file = copy / edit.file
    text = file.read_text(encoding="utf-8")
    if text.count(edit.old) != 1:
        raise ValueError(f"{edit.file} has {text.count(edit.old)} times {edit.old!r}, not once")
    file.write_text(text.replace(edit.old, edit.new), encoding="utf-8")


def command(source: Path, arguments: list[str], log: Path) -> int:
    """The exit status of `agentic-train` of a source tree."""
    program = "import sys; from trainer.cli import main; sys.exit(main())"
    environment = {**os.environ, "PYTHONPATH": str(source)}
    with log.open("w", encoding="utf-8") as out:
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            cwd=source,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
            check=False,
        )
    return done.returncode


def steps_of(run: Path) -> int:
    """The steps that are in the run's metrics."""
    file = run / "metrics.jsonl"
    if not file.exists():
        return 0
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return max((int(line.get("step", 0)) for line in lines), default=0)


def last_error(log: Path) -> str:
    """The last line that names an error."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8").splitlines() if line.strip()]
    named = [line for line in lines if re.search(r"error|differ|refuse|fail", line, re.IGNORECASE)]
    return (named or lines or ["nothing"])[-1].replace("|", "\\|")[:300]


def warnings_of(log: Path) -> str:
    """The first warning that the run gave."""
    lines = log.read_text(encoding="utf-8").splitlines()
    return next((line.strip()[:300] for line in lines if line.startswith("warning:")), "")


if __name__ == "__main__":
    sys.exit(main())
