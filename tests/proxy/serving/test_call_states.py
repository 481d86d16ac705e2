"""Calls against a real store, in which any await can fail, be cancelled, hang, or be the last.

After each step the invariants of a call hold (see `proxy/serving/call.py`). When all calls have
ended, no turn is open, no session is held, and the tree in memory equals the store.
"""

from __future__ import annotations

import asyncio
import base64
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from proxy.config import RenderingConfig, SessionsConfig, ToolsConfig
from proxy.conversation.messages import Conversation, Message, load_answer
from proxy.errors import EngineError, ProxyError, StoreError
from proxy.metrics import Metrics
from proxy.records import Turn, TurnStatus
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import load_tokenizer
from proxy.routing.router import Router
from proxy.serving import images, ownership
from proxy.serving.asked import Caller
from proxy.serving.backend import Backend
from proxy.serving.call import LiveCall
from proxy.serving.images import Images
from proxy.serving.incoming import IncomingCalls
from proxy.serving.ownership import Deliveries, Ownership
from proxy.serving.provider_tools import ProviderTools
from proxy.serving.sessions import LiveSession, Sessions
from proxy.settings.profiles import Profiles
from proxy.store.protocol import Undelivered
from proxy.store.sqlite import SqliteStore
from proxy.testing.scripted_images import PICTURE
from proxy.token_tree.tree import TokenTree
from proxy.wire.dialect import Call, ForcedCall, Options
from proxy.wire.images import SentImages
from tests.proxy.checkpoint import PICTURES, write_checkpoint
from tests.proxy.serving.faulty_parts import CrashError, FaultKind, GatedEngine, Gates, faulty

QUESTIONS = ("One?", "Two?")
faults = st.sampled_from(["fail", "cancel", "crash", "stand"])
awaits = st.integers(0, 12)


class Process:
    """The parts of one proxy process that serve calls."""

    def __init__(self, file: Path, rendering: Rendering) -> None:
        self.gates = Gates()
        self.store = SqliteStore(file)
        store = faulty(self.store, self.gates)
        self.ownership, self.deliveries = Ownership(store), Deliveries(store)
        self.sessions = Sessions(store, SessionsConfig(), Profiles({}))
        router = Router([GatedEngine(rendering, self.gates)])
        backend = Backend(
            store,
            router,
            rendering,
            Metrics(),
            self.ownership,
            self.deliveries,
            ProviderTools(ToolsConfig(), store),
            Images(store, router, rendering),
            context_tokens=None,
            call_timeout_s=60.0,
        )
        self.calls = IncomingCalls(backend, SessionsConfig())

    def kill(self) -> None:
        """Acts like `kill -9`: nothing more reaches the store, and the lock is released."""
        self.gates.killed = True
        self.store._owner.release()


@dataclass
class Agent:
    """A request of an agent, and the texts of its answers."""

    task: asyncio.Task[list[str]]
    retry: bool


class CallMachine(RuleBasedStateMachine):
    """Agents call, disconnect and retry; the process fails in all ways and is killed."""

    rendering: Rendering

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory()
        self.file = Path(self.folder.name) / "s.sqlite"
        self.agents: list[Agent] = []
        self.old: list[Process] = []
        self.uncertain: set[str] = set()
        """Texts that a killed process delivered without a durable mark."""
        self.run(self.begin())

    async def begin(self) -> None:
        self.process = Process(self.file, self.rendering)
        _, self.key = await self.process.sessions.create("t")
        self.reader = SqliteStore(self.file)

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 5))

    @rule(
        question=st.sampled_from(QUESTIONS),
        stream=st.booleans(),
        retry=st.booleans(),
        n=st.sampled_from([1, 1, 2]),
    )
    def ask(self, question: str, stream: bool, retry: bool, n: int) -> None:
        message, sent = Message("user", question), None
        if self.rendering.image_token is not None:
            sent = SentImages()
            picture = base64.b64encode(PICTURE + question.encode()).decode()
            block = {"type": "image", "source": {"type": "base64", "data": picture}}
            message.text += sent.taken(block, "[image]") or ""
        conversation = Conversation([message])
        request = Call("m", conversation, Options(), n=n, stream=stream, images=sent)
        work = self.answered(request, retry)
        self.agents.append(Agent(self.loop.create_task(work), retry))

    async def answered(self, request: Call, retry: bool) -> list[str]:
        process, caller = self.process, Caller("chat", self.loop.time(), is_retry=retry)
        live = await process.sessions.authorise(self.key, None)
        live.users += 1
        try:
            call = await process.calls.open(live, request, caller)
            with call.watched(lambda: True) as watcher:
                outcomes = await watcher.outcomes()
                recorded = await self.reader.get_turns("t")
                for outcome in outcomes:
                    turn = recorded[outcome.turn]
                    assert turn.status in (TurnStatus.DONE, TurnStatus.SUPERSEDED)
                    assert load_answer(turn.answer).text == outcome.message.text
                watcher.arrived = True
                return [outcome.message.text for outcome in outcomes]
        finally:
            live.users -= 1

    @rule(kind=faults, after=awaits)
    def arm(self, kind: FaultKind, after: int) -> None:
        self.process.gates.arm(kind, after)

    @rule(count=st.integers(0, 50))
    def hang_up(self, count: int) -> None:
        running = [agent for agent in self.agents if not agent.task.done()]
        if running:
            running[count % len(running)].task.cancel()

    @rule(steps=st.integers(1, 30))
    def go_on(self, steps: int) -> None:
        async def turn_over() -> None:
            for _ in range(steps):
                await asyncio.sleep(0)

        self.run(turn_over())

    @rule()
    def evict(self) -> None:
        live = self.process.sessions._live.get("t")
        if live is not None and not live.in_use:
            del self.process.sessions._live["t"]

    @rule()
    def kill(self) -> None:
        marked = self.run(self.reader.undelivered("t"))
        for turn in self.run(self.reader.get_turns("t")):
            if turn.answer and turn.index in marked.pending | marked.lost:
                self.uncertain.add(load_answer(turn.answer).text)
        self.process.kill()
        self.old.append(self.process)
        for agent in self.agents:
            agent.task.cancel()
        self.process = self.run(self.start_again())

    async def start_again(self) -> Process:
        return Process(self.file, self.rendering)

    @rule()
    def come_to_rest(self) -> None:
        self.run(self.rest())

    async def rest(self) -> None:
        self.process.gates.disarm()
        for agent in self.agents:
            with suppress(ProxyError, CrashError, asyncio.CancelledError):
                await agent.task
        live = self.process.sessions._live.get("t")
        while live is not None and (live.own or live.running):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        recorded = await self.reader.get_turns("t")
        assert TurnStatus.OPEN not in {turn.status for turn in recorded}
        assert not (await self.reader.undelivered("t")).pending
        if live is not None:
            async with live.placing:
                await self.process.ownership.settle(live)
            assert nodes(live.tree) == nodes(TokenTree(recorded))
        self.check_deliveries()

    def check_deliveries(self) -> None:
        """An answer that arrived at a request is replayed only to a retry."""
        done = [a for a in self.agents if not a.task.cancelled() and not a.task.exception()]
        fresh = [text for agent in done if not agent.retry for text in agent.task.result()]
        assert all(fresh.count(text) == 1 or text in self.uncertain for text in fresh)

    @invariant()
    def every_open_turn_has_a_call_or_is_being_closed(self) -> None:
        recorded: list[Turn] = self.run(self.reader.get_turns("t"))
        live = self.process.sessions._live.get("t")
        for turn in recorded:
            if turn.status is TurnStatus.OPEN and (live is None or turn.index not in live.own):
                again = self.run(self.reader.get_turns("t"))  # it may have been closed in between
                assert again[turn.index].status is not TurnStatus.OPEN
        held = self.held(live) if live is not None else set()
        assert live is None or live.own <= held
        assert [turn.index for turn in recorded] == list(range(len(recorded)))
        for image in {image.sha256 for turn in recorded for image in turn.images}:
            assert self.run(self.reader.get_image(image)) is not None
        texts = [load_answer(t.answer).text for t in recorded if t.status is TurnStatus.DONE]
        assert len(set(texts)) == len(texts)

    def held(self, live: LiveSession) -> set[int]:
        """Turns with a reason to be held: a running call, a closing attempt, a pending mark."""
        held = {pending.mark.index for pending in self.process.deliveries._pending}
        if self.process.deliveries._writing is not None or self.process.ownership._closing:
            return live.own
        for call in live.running:
            assert isinstance(call, LiveCall)
            held |= {*call.turns, *call._unrecorded}
        return held

    def teardown(self) -> None:
        try:
            self.run(self.rest())
        finally:
            self.loop.run_until_complete(self.end())
            self.loop.close()
            self.folder.cleanup()

    async def end(self) -> None:
        await self.process.deliveries.close()
        await self.process.ownership.stop()
        for process in self.old:
            process.deliveries._pending.clear()
            await process.ownership.stop()
        while left := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=0.01)
        await self.process.store.close()
        await self.reader.close()
        for process in self.old:
            await process.store._writer.close()
            process.store._reading.close()


def nodes(tree: TokenTree) -> list[Any]:
    return [
        (
            *(node.parent, node.shared_tokens, node.status, node.request_key, node.answer_key),
            *(node.marks, node.truncated_at, node.sampled),
            *(node.prompt_ids.tolist(), node.sampled_ids.tolist(), node.children),
        )
        for node in tree.nodes
    ]


@contextmanager
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ownership, "DELAY_S", 0.0)
    monkeypatch.setattr(ownership, "RETRY_DELAY_S", 0.0)
    monkeypatch.setattr(ownership, "CLOSE_DELAYS_S", (0.0,))
    yield


class Scene:
    """One process on a store of its own, and a session."""

    def __init__(self, process: Process, key: str) -> None:
        self.process = process
        self.key = key

    async def ask(self, *, retry: bool = False) -> list[str]:
        """The texts that a request gets. Raises the error that it gets instead."""
        live = await self.process.sessions.authorise(self.key, None)
        request = Call("m", Conversation([Message("user", "One?")]), Options())
        call = await self.process.calls.open(live, request, Caller("chat", 0.0, is_retry=retry))
        with call.watched(lambda: True) as watcher:
            texts = [outcome.message.text for outcome in await watcher.outcomes()]
            watcher.arrived = True
            return texts

    async def settled(self) -> LiveSession:
        """The session, when it has no turn of its own left."""
        live = await self.process.sessions.get("t")
        while live.own:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        return live


@pytest.fixture
async def scene(
    rendering: Rendering, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Scene]:
    with quick_retries(monkeypatch):
        process = Process(tmp_path / "s.sqlite", rendering)
        _, key = await process.sessions.create("t")
        yield Scene(process, key)
        await process.deliveries.close()
        await process.ownership.stop()
        await process.store.close()


@pytest.mark.parametrize("error", [StoreError("no reply"), CrashError(), asyncio.CancelledError()])
async def test_answer_recorded_by_a_write_that_seems_to_fail_is_replayed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    commit_turn = scene.process.store.commit_turn

    async def commit_and_fail(turn: Turn, quota: str) -> None:
        await commit_turn(turn, quota)
        raise error

    monkeypatch.setattr(scene.process.store, "commit_turn", commit_and_fail)
    with pytest.raises((ProxyError, CrashError)):
        await scene.ask()
    await scene.settled()
    assert await scene.process.store.undelivered("t") == Undelivered(lost=frozenset({0}))

    monkeypatch.undo()
    (recorded,) = await scene.process.store.get_turns("t")
    assert await scene.ask() == [load_answer(recorded.answer).text]
    assert await scene.ask() != [load_answer(recorded.answer).text]


async def test_tree_is_read_once_more_if_a_write_failed_while_it_was_read(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    await scene.ask()
    live, store = await scene.settled(), scene.process.store
    undelivered, faults, reads = store.undelivered, [None, StoreError("no reply")], 0

    async def meanwhile(session_id: str) -> Undelivered:
        nonlocal reads
        reads += 1
        if faults:
            live.stale = True  # as a call does whose write has failed
            if (error := faults.pop()) is not None:
                raise error
        return await undelivered(session_id)

    monkeypatch.setattr(store, "undelivered", meanwhile)
    live.stale = True
    with pytest.raises(StoreError):
        await scene.process.ownership.settle(live)
    assert live.stale
    await scene.process.ownership.settle(live)
    assert reads == 3
    assert not live.stale


@pytest.mark.parametrize("read", ["get_turns", "undelivered"])
async def test_tree_has_an_answer_that_is_recorded_while_it_is_read(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, read: str
) -> None:
    store, live = scene.process.store, await scene.process.sessions.get("t")
    commit_turn, reads = store.commit_turn, getattr(store, read)
    about_to_record, reading = asyncio.Event(), asyncio.Event()

    async def commit_late(turn: Turn, quota: str) -> None:
        about_to_record.set()
        await reading.wait()
        await commit_turn(turn, quota)

    async def read_early(session_id: str, **part: int) -> Any:
        found = await reads(session_id, **part)
        reading.set()
        await answer
        return found

    monkeypatch.setattr(store, "commit_turn", commit_late)
    answer = asyncio.create_task(scene.ask())
    await about_to_record.wait()
    monkeypatch.setattr(store, read, read_early)
    live.stale = True
    async with live.placing:
        await scene.process.ownership.settle(live)
    assert nodes(live.tree) == nodes(TokenTree(await store.get_turns("t")))


@pytest.mark.parametrize("error", [StoreError("no reply"), CrashError(), asyncio.CancelledError()])
async def test_closing_a_turn_is_tried_again_after_any_error(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    cut_own_turn, errors = scene.process.store.cut_own_turn, [error, error]

    async def fail_twice(session_id: str, index: int, quota: str) -> bool:
        if errors:
            raise errors.pop()
        return await cut_own_turn(session_id, index, quota)

    monkeypatch.setattr(scene.process.store, "cut_own_turn", fail_twice)
    monkeypatch.setattr(scene.process.store, "commit_turn", AsyncMock(side_effect=StoreError("no")))
    with pytest.raises(StoreError):
        await scene.ask()
    await scene.settled()
    (turn,) = await scene.process.store.get_turns("t")
    assert turn.status is TurnStatus.CUT
    assert not errors


async def test_call_that_is_aborted_while_its_answer_is_recorded_begins_no_required_call(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_turn = scene.process.store.commit_turn

    async def commit_and_abort(turn: Turn, quota: str) -> None:
        await commit_turn(turn, quota)
        call.abort(EngineError("it takes too long"))

    monkeypatch.setattr(scene.process.store, "commit_turn", commit_and_abort)
    live = await scene.process.sessions.authorise(scene.key, None)
    look = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    conversation = Conversation([Message("user", "One?")], tools=[look])
    request = Call("m", conversation, Options(forced=ForcedCall()))
    call = await scene.process.calls.open(live, request, Caller("chat", 0.0))
    with call.watched(lambda: True) as watcher, pytest.raises(EngineError, match="too long"):
        await watcher.outcomes()
    await scene.settled()
    (turn,) = await scene.process.store.get_turns("t")
    assert turn.status is TurnStatus.DONE
    assert (await scene.process.store.undelivered("t")).lost == {0}


@pytest.mark.parametrize("with_images", [False, True])
def test_no_turn_stays_open_or_is_lost_if_any_await_fails(
    rendering: Rendering, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, with_images: bool
) -> None:
    """With images: none that a turn names is missing in the store, whatever fails."""

    class Machine(CallMachine):
        pass

    Machine.rendering = rendering
    if with_images:
        seeing = load_tokenizer(write_checkpoint(tmp_path / "seeing", template=PICTURES))
        Machine.rendering = Rendering(seeing, RenderingConfig())
        monkeypatch.setattr(images, "LOOK_AGAIN_S", 0.0)
    with quick_retries(monkeypatch):
        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=30,
                stateful_step_count=25,
                deadline=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )
