"""One agent works with one family's policy: its trial, and what the record says of it."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent_loop.launchers.command import CommandLauncher
from agent_loop.records import Rollout, Task
from agent_loop.remote_agent_loop import RemoteAgentLoop
from agent_loop.rewards.verifier import Verifier, VerifierConfig
from agent_loop.trial.config import TrialConfig
from proxy.conversation.json_values import parsed_arguments
from proxy.conversation.messages import load_answer
from proxy.conversation.recorded import load_conversation
from proxy.records import ForkCause, SessionKind, Turn, TurnStatus
from tests.e2e.agents.census.agents import Agent
from tests.e2e.agents.census.families import Writer
from tests.e2e.agents.census.policy import SUMMARY, Plan, Policy, Written, offered_tools, role_of
from tests.proxy.conftest import RunningProxy

PROVIDER_TOOL = "would be run by the model's provider"
"""The refusal of a request all of whose tools only a provider can run, such as Claude Code's call
for a web search. It is right, and the agent has to survive it."""


@dataclass(slots=True)
class Row:
    """What is known of one agent with one family: a line of the table."""

    agent: str
    version: str
    family: str
    status: str
    offered: list[str]
    driven: list[str]
    """The offered tools that the policy called at least twice."""
    turns: int
    paths: int
    needless: list[str] = field(default_factory=list)
    """The cause of each needless fork, with the turn and what the agent sent."""
    designed: Mapping[str, int] = field(default_factory=dict)
    """Reason of a fork or a refusal that is none of ours → number."""
    refused: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    """Arguments that reached the agent changed, and files with other content than written."""
    failed: list[str] = field(default_factory=list)
    images: int = 0
    """Number of images that it sent to a model that reads them, each counted once."""

    @property
    def good(self) -> bool:
        return not self.faults()

    def faults(self) -> list[str]:
        return [*self.needless, *self.refused, *self.changed, *self.failed]

    def summary(self) -> str:
        return (
            f"{self.agent} {self.version} {self.family}: {len(self.driven)} of "
            f"{len(self.offered)} tools, {self.turns} turns, {self.paths} paths, "
            f"{len(self.needless)} needless forks, {len(self.refused)} refused, "
            f"{len(self.changed)} changed, {len(self.failed)} failed, {self.images} images, "
            f"other {dict(self.designed)}"
        )


async def run_agent(
    agent: Agent,
    proxy: RunningProxy,
    writer: Writer,
    folder: Path,
    *,
    timeout_s: float,
    plan: Plan | None = None,
    dies_at: int | None = None,
) -> tuple[Row, Policy, Rollout, list[Turn]]:
    """The agent's trial in `folder`. `plan`: instead of the agent's own. `dies_at`: the answer in
    which the engine's connection breaks."""
    policy = Policy(
        proxy,
        writer,
        plan or agent.plan,
        None if plan or agent.text_only else agent.drawn,
        agent.hands.shell,
        trials=folder / "trials",
        last=agent.last,
        reports=agent.reports,
        text_only=agent.text_only,
        one_call=agent.one_call,
        dies_at=dies_at,
    )
    proxy.engine.script = policy
    census = agent.root / "census/node_modules"
    own = (*census.glob("node-linux-*/bin"), *census.glob("@aaif/goose-*/bin"))
    programs = (agent.root / "bin", census / ".bin", *own)
    path = ":".join([*map(str, programs), os.environ["PATH"]])
    command = agent.command()
    loop = RemoteAgentLoop(
        proxy.control,
        CommandLauncher(
            command.model_copy(
                update={
                    "argv": ("env", *command.argv),
                    "env": {"PATH": path, **command.env},
                    "template": str(write_workspace(folder / "template")),
                }
            )
        ),
        Verifier(VerifierConfig(argv=("true",))),
        folder / "trials",
        trial=TrialConfig(timeout_s=timeout_s, max_retries=0, keep_workspaces=True),
    )
    try:
        rollout = await loop.run(
            Task("census", {"prompt": "Part 1: do what is to be done."}), kind=SessionKind.TRAIN
        )
    finally:
        await loop.close()
    _, turns = await proxy.control.get_turns(rollout.trial_id)
    events = [event async for event in proxy.control.events(rollout.trial_id)]
    return _row(agent, writer, policy, rollout, turns, events), policy, rollout, turns


def write_workspace(folder: Path) -> Path:
    """What every agent finds: a text, a picture and a document."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "notes.txt").write_text("one\n  two  \n\tthree é 😀\n")
    (folder / "long.txt").write_text("".join(f"line {n} of a long file\n" for n in range(3000)))
    (folder / "picture.png").write_bytes(_png())
    (folder / "paper.pdf").write_bytes(_pdf())
    return folder


def _png() -> bytes:
    """A picture of 16 × 16 red points."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    size = struct.pack(">IIBBBBB", 16, 16, 8, 2, 0, 0, 0)
    points = zlib.compress((b"\0" + b"\xff\0\0" * 16) * 16)
    start = b"\x89PNG\r\n\x1a\n"
    return start + chunk(b"IHDR", size) + chunk(b"IDAT", points) + chunk(b"IEND", b"")


def _pdf() -> bytes:
    """A document of one page with one line."""
    text = b"BT /F1 12 Tf 20 100 Td (One page.) Tj ET"
    objects = (
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 200 200]/Contents 4 0 R"
        b"/Resources<</Font<</F1 5 0 R>>>>>>",
        b"<</Length %d>>stream\n%s\nendstream" % (len(text), text),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    )
    out, places = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj%s endobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    return out + (
        b"xref\n0 6\n0000000000 65535 f \n%strailer<</Size 6/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF\n"
        % (table, len(out))
    )


def _row(
    agent: Agent,
    writer: Writer,
    policy: Policy,
    rollout: Rollout,
    turns: Sequence[Turn],
    events: Sequence[Mapping[str, Any]],
) -> Row:
    calls = policy.counts()
    offered = sorted({tool["function"]["name"] for tool in _tools(turns, policy.written)})
    needless: list[str] = []
    designed: Counter[str] = Counter()
    for turn in turns:
        if turn.fork_cause is not None:
            reason = fork_reason(agent, turns, turn)
            designed.update([reason] if reason else [])
            needless += [] if reason else [_fork(turns, turn)]
    failed = [] if rollout.status == "done" else [f"{rollout.status}: {rollout.error}"]
    failed += [f"part ended with {code}" for code in _codes(rollout) if code != "0"]
    failed += [f"turn {t.index} was cut" for t in turns if t.status is TurnStatus.CUT]
    failed += policy.errors
    refused = [f"{e.get('status')} {e.get('message')}" for e in events if e["kind"] == "refused"]
    provider = [each for each in refused if PROVIDER_TOOL in each]
    designed.update(["provider's tool"] * len(provider))
    return Row(
        agent=agent.name,
        version=agent.version(agent.root),
        family=writer.family.name,
        status=str(rollout.status),
        offered=offered,
        driven=[name for name in offered if calls[name] > 1],
        turns=len(turns),
        paths=len({turn.index for turn in turns} - {turn.parent for turn in turns}),
        needless=needless,
        designed=dict(designed),
        refused=[each for each in refused if each not in provider],
        changed=[*_changed(turns, policy.written, tags=writer.family.tags), *policy.wrong_files],
        failed=failed,
        images=len({image.sha256 for turn in turns for image in turn.images}),
    )


def _tools(turns: Sequence[Turn], written: Sequence[Written]) -> list[dict[str, Any]]:
    """The tools that the main agent offers."""
    found = (load_conversation(turns, each.turn) for each in written if each.role == "main")
    return [tool for each in found if each for tool in offered_tools(each.conversation)]


def _codes(rollout: Rollout) -> list[str]:
    log = (Path(rollout.logs or os.devnull) / "agent.log").read_text(errors="replace")
    return [line.split()[-1] for line in log.splitlines() if line.startswith("census: ended ")]


def _changed(turns: Sequence[Turn], written: Sequence[Written], *, tags: bool) -> list[str]:
    """The calls that the agent did not get as they were written."""
    out = []
    for each in written:
        turn = turns[each.turn]
        if turn.status is not TurnStatus.DONE:
            continue
        got = [(c.name, parsed_arguments(c.arguments)) for c in load_answer(turn.answer).tool_calls]
        sent = [(c.name, json.loads(c.arguments)) for c in each.answer.tool_calls]
        names = [name for name, _ in got] == [name for name, _ in sent]
        if not names or not _same([a for _, a in got], [a for _, a in sent], tags=tags):
            out.append(f"turn {each.turn}: {got!r} instead of {sent!r}")
    return out


def _same(got: Any, sent: Any, *, tags: bool) -> bool:
    """Tags have no quotes: a number that was written as a string is the number there."""
    if isinstance(got, dict) and isinstance(sent, dict):
        return got.keys() == sent.keys() and all(_same(got[n], sent[n], tags=tags) for n in sent)
    number = isinstance(got, int | float) and not isinstance(got, bool)
    if tags and number and isinstance(sent, str):
        return json.dumps(got) == sent
    if isinstance(got, list) and isinstance(sent, list):
        pairs = zip(got, sent, strict=False)
        return len(got) == len(sent) and all(_same(g, s, tags=tags) for g, s in pairs)
    return type(got) is type(sent) and bool(got == sent)


def fork_reason(agent: Agent, turns: Sequence[Turn], turn: Turn) -> str | None:
    """Why a fork is none of ours; None if it is needless."""
    found = load_conversation(turns, turn.index)
    if found is None:
        return None
    texts = [message.text for message in found.conversation.messages]
    if any(SUMMARY.splitlines()[1] in text for text in texts):
        return "compaction"
    role = role_of(found.conversation)
    if role in ("sub-agent", "summary"):
        return "compaction" if role == "summary" else role
    if turn.fork_cause is ForkCause.ROLLED_BACK and _sub_agent_was_first(turns, turn):
        return "sub-agent"
    return next((d.name for d in agent.designs if d.matches(turn, found.conversation)), None)


def _sub_agent_was_first(turns: Sequence[Turn], turn: Turn) -> bool:
    """Whether only sub-agents that inherit the history have continued the turn before the main
    agent did, whose request then is the fork."""
    earlier = [each for each in turns[: turn.index] if each.parent == turn.parent]
    found = [load_conversation(turns, each.index) for each in earlier]
    return all(each and role_of(each.conversation) == "sub-agent" for each in found)


def _fork(turns: Sequence[Turn], turn: Turn) -> str:
    """The fork in words, with what it brought: the first request after it shows the cause."""
    assert turn.fork_cause is not None
    found = load_conversation(turns, turn.index)
    messages = found.conversation.messages if found else []
    tail = "".join(
        f"\n    {m.role}: {m.text[:160]!r} {[(c.name, c.arguments[:200]) for c in m.tool_calls]}"
        for m in messages[-3:]
    )
    return f"turn {turn.index}, {turn.fork_cause.value} after turn {turn.parent}:{tail}"
