"""Records a trial of an agent, runs it again to chosen turns, and measures what was equal."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from agent_loop.records import Rollout, RolloutStatus
from proxy.branching.tolerance import Tolerance
from proxy.client import ProxyClient
from proxy.records import Origin, Turn, TurnStatus
from proxy.rendering.rendering import Rendering
from proxy.settings.profiles import Profiles
from proxy.testing.scripted_engine import ScriptedEngine, text_script
from proxy.token_tree.paths import prefix

State = dict[str, bytes]
Answers = Callable[[str], str]
Run = Callable[[Origin | None], Awaitable[Rollout]]
SHOWN_CHARS = 300
ANSWERED = (TurnStatus.DONE, TurnStatus.CONTEXT)


def state_of(folder: Path) -> State:
    """Every file that the agent's tools have written, by its path. Of a Git repository: the blobs
    of its last commit; the rest of its own files differs with the times of the commits."""
    files = (file for file in folder.rglob("*") if file.is_file())
    inner = {file.relative_to(folder): file for file in files}
    state = {str(at): file.read_bytes() for at, file in inner.items() if ".git" not in at.parts}
    if (folder / ".git").is_dir():
        listed = ["git", "-C", str(folder), "ls-tree", "-r", "HEAD"]
        state[".git"] = subprocess.run(listed, capture_output=True, check=False).stdout
    return state


class ProxyUnderTest(Protocol):
    """The parts of a running proxy that are used here (`tests.proxy.conftest.RunningProxy`)."""

    engine: ScriptedEngine
    control: ProxyClient
    rendering: Rendering


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded trial, with the workspace as it was at each call and at the end."""

    rollout: Rollout
    turns: list[Turn]
    states: dict[tuple[int, ...], State]
    """The workspace when each prompt was sampled first."""
    final: State

    def prompt(self, turn: int) -> tuple[int, ...]:
        """The whole prompt of a turn."""
        found = self.turns[turn]
        ids = prefix(self.turns, found.parent, found.shared_tokens, found.prompt_ids)
        return tuple(ids.tolist())


@dataclass(frozen=True, slots=True)
class Rerun:
    """What one run to turn `turn` has shown."""

    turn: int
    error: str | None
    diverged: str | None
    """Where it went another way, with the diff."""
    replayed: bool
    """Whether each recorded answer has reached the agent."""
    early_calls: int
    """Calls of the engine for a recorded turn."""
    first_prompt: bool
    """The first sampled prompt begins with the recorded ids; true if nothing was left to sample."""
    workspace: str | None
    """The first file that differs by more than the profile tolerates."""
    tolerated: dict[str, int]
    """Number of differences by kind."""
    branch: Recording
    """The run itself."""

    @property
    def reached(self) -> bool:
        return self.replayed and self.error is None and self.diverged is None


class Rewinder:
    """Runs one trial at a time and notes the workspace at each of its calls."""

    def __init__(
        self, proxy: ProxyUnderTest, run: Run, trials: Path, answers: Answers,
        final: Callable[[Rollout], State] | None = None, task_id: str = "hi",
    ) -> None:  # fmt: skip
        """`run` runs a trial of the task `task_id` in `trials`. `final`: the workspace after the
        trial, if it is not the folder `work` of the trial; then it is compared only there."""
        self.proxy = proxy
        self._task_id = task_id
        self._run = run
        self._trials = trials
        self._final = final
        self._states: dict[tuple[int, ...], State] = {}
        tokenizer = proxy.rendering.tokenizer
        script = text_script(
            answers,
            decode=tokenizer.decode,
            encode=tokenizer.encode,
            end_ids=[tokenizer.convert_tokens_to_ids("<|im_end|>")],
        )

        def noted(prompt_ids: list[int]) -> Sequence[int]:
            if final is None:
                self._states.setdefault(tuple(prompt_ids), self._latest())
            return script(prompt_ids)

        proxy.engine.script = noted

    def _latest(self) -> State:
        own = self._trials.glob(f"{self._task_id}-*")
        return state_of(max(own, key=_created) / "work")

    async def record(self, origin: Origin | None = None) -> Recording:
        engine = self.proxy.engine
        self._states.clear()
        engine.calls.clear()
        engine.faults.clear()
        rollout = await self._run(origin)
        _, turns = await self.proxy.control.get_turns(rollout.trial_id)
        final = self._latest() if self._final is None else self._final(rollout)
        return Recording(rollout, turns, dict(self._states), final)

    async def rerun(self, recording: Recording, turn: int) -> Rerun:
        """Runs the trial again to `turn`, and lets it go on."""
        recorded, parent = recording.turns, recording.rollout.trial_id
        again = await self.record(Origin(parent, turn))
        name = again.rollout.trial_id
        shown = await self.proxy.control.show(name)
        events = [event async for event in self.proxy.control.events(name)]
        diverged = [event for event in events if event["kind"] == "diverged"]
        answered = [each.index for each in recorded[:turn] if each.status in ANSWERED]
        before = {recording.prompt(index) for index in answered}
        later = {recording.prompt(each.index) for each in recorded[turn:]}
        asked = [tuple(call.prompt_ids) for call in self.proxy.engine.calls]
        early = [prompt for prompt in asked if prompt in before - later]
        differences = (
            difference["name"]
            for event in events
            if event["kind"] == "tolerated"
            for difference in event["differences"]
        )
        return Rerun(
            turn=turn,
            error=_error(again.rollout, sampled=turn < len(recorded)),
            diverged=f"{diverged[0]['summary']}\n{diverged[0]['diff']}" if diverged else None,
            replayed=set(answered) <= set(shown["replay"]["turns"]),
            early_calls=len(early),
            first_prompt=_continues(recording, turn, asked),
            workspace=self._differs(recording, again, turn),
            tolerated=dict(Counter(differences)),
            branch=again,
        )

    def _differs(self, recording: Recording, again: Recording, turn: int) -> str | None:
        rollouts = (recording.rollout, again.rollout)
        names = {
            "session": [rollout.trial_id for rollout in rollouts],
            "folder": [str(Path(rollout.logs or "").resolve()) for rollout in rollouts],
        }
        tolerance = Tolerance(Profiles({}).get("default"), names)
        pairs = [(recording.final, again.final)]
        if turn < len(recording.turns):
            asked = dict.fromkeys(recording.prompt(t.index) for t in recording.turns[turn:])
            there = [recording.states[prompt] for prompt in asked if prompt in recording.states]
            pairs += zip(there, again.states.values(), strict=False)
        found = (difference(tolerance, one, other) for one, other in pairs)
        return next((each for each in found if each is not None), None)


def difference(tolerance: Tolerance, one: State, other: State) -> str | None:
    """The first file that is in only one of the states, or has another content there."""
    files = [
        Counter(
            (tolerance.masked(at), tolerance.masked(data.decode("latin-1")))
            for at, data in state.items()
        )
        for state in (one, other)
    ]
    for at, data in sorted((files[0] - files[1]) + (files[1] - files[0])):
        return f"{at}: {data[:SHOWN_CHARS]!r}"
    return None


def _error(rollout: Rollout, *, sampled: bool) -> str | None:
    """A run that has nothing to sample is no training data, but its agent has not failed."""
    if rollout.status is RolloutStatus.DONE:
        return None
    error = rollout.error or rollout.status.value
    return error if sampled or not error.endswith("recorded ones") else None


def _continues(recording: Recording, turn: int, asked: Sequence[tuple[int, ...]]) -> bool:
    """Whether the first sampled prompt is the recorded path, followed by other ids."""
    if turn == len(recording.turns):
        return True
    shared = recording.turns[turn].shared_tokens
    return bool(asked) and asked[0][:shared] == recording.prompt(turn)[:shared]


def _created(folder: Path) -> int:
    return folder.stat().st_ctime_ns


def row(rerun: Rerun) -> dict[str, Any]:
    """As JSON, without the run itself."""
    names = (each.name for each in fields(rerun) if each.name != "branch")
    return {name: getattr(rerun, name) for name in names} | {"reached": rerun.reached}
