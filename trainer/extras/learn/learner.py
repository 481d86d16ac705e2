"""The loop of a learner: look at the record, judge, compare, update.

    tick: judge what has ended ─▶ decide about the canary ─▶ update, if it is due

Invariant: at most one canary at a time; an update begins while there is one only if that may give
way. A session is judged once, when every source knows what it will know. Nothing is served before
its gates are passed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import Any

from agent_loop.records import Group
from agent_loop.trial.pictures import with_pictures
from proxy.client import ProxyClientError
from proxy.extras.learn.client import LearnClient
from proxy.extras.secrets.tokens import Decode
from proxy.records import Session, Turn
from proxy.records.binary import mark_fields, reward_fields
from proxy.settings.section import Section
from proxy.store.curation import MAX_VALUE_CHARS
from trainer.cluster.rank_zero import RankZero
from trainer.errors import TrainingError, WeightSyncError
from trainer.extras.learn.canary import Comparison
from trainer.extras.learn.config import LearnConfig
from trainer.extras.learn.gates import as_json, refusals
from trainer.extras.learn.journal import History, Journal
from trainer.extras.learn.judging import Judged, is_due, judged
from trainer.extras.learn.rollouts import Lineage, adapter_of, prepared, scored
from trainer.extras.learn.seen import Seen
from trainer.extras.learn.update import (
    SERVED,
    Adapters,
    Begin,
    CompareAdapters,
    PublishAdapter,
    UpdateAdapter,
)
from trainer.extras.ledger.ledger import line_of_step
from trainer.weight_sync.control import EngineControl

_log = logging.getLogger(__name__)
AWAY = frozenset({0, 502, 503, 504})
OVERTAKEN = "a person or the test has decided about the canary meanwhile"
WITHOUT_GOOD = 2
"""This many times `update.sessions` make an update without enough good ones. It learns what not to
do, so that other ways come up."""


class DailyLearner:
    """Example:
    learner = DailyLearner(config, recorder, rank_zero, probe)
    await learner.begin()
    await learner.run(stop)
    """

    def __init__(
        self,
        config: LearnConfig,
        recorder: LearnClient,
        rank_zero: RankZero,
        probe: Sequence[int] = (),
        decode: Decode | None = None,
    ) -> None:
        """`probe`: ids on which trainer and engines are compared. `decode`: the tokenizer's, by
        which tokens of secrets are found."""
        self.config = config
        self.recorder = recorder
        self.rank_zero = rank_zero
        self.policy = config.recorder.policy
        self.adapters = Adapters(config.folder, self.policy)
        self.journal = Journal(config.folder)
        self.history = History.of(self.journal.lines)
        self._probe = list(probe)
        self._decode = decode
        self._served: dict[int, str] = {}
        """Adapter → the engines' name of it, of those that this process has published."""
        self._kept: Set[str] = frozenset()
        """The policies whose adapters are loaded since it was last looked at."""
        self._untrainable: dict[str, int] = {}
        """Session of which nothing can be trained → the stable adapter when that was found."""

    async def begin(self) -> None:
        """Continues where the journal ends. Raises TrainerError."""
        weights = await self.rank_zero.ask(Begin(self.adapters))
        if not self.journal.lines:
            self._write("begin", config=_digest(self.config), weights=weights)
        self._give_up_pending()

    def _give_up_pending(self) -> None:
        """An adapter that was made, and that neither a gate nor an engine has refused: this
        process, or the recorder, went away before it was served. Its sessions are new again."""
        if (number := self.history.pending) is not None:
            self._write("rollback", number=number, by="interrupted")

    def read_journal(self) -> None:
        """Takes what the journal says now."""
        self.history = History.of(self.journal.lines)

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set. A recorder that is away is asked again."""
        while not stop.is_set():
            try:
                await self.tick()
            except ProxyClientError as error:
                if error.status not in AWAY:
                    raise
                _log.warning("the recorder is away: %s", error)
            except WeightSyncError as error:
                _log.warning("an engine is away: %s", error)
            try:
                await asyncio.wait_for(stop.wait(), self.config.poll_s)
            except TimeoutError:
                continue

    async def tick(self) -> None:
        """Does what is due. Raises ProxyClientError, TrainerError."""
        self._give_up_pending()
        await self._serve_what_counts(await self.recorder.assignment(self.policy))
        state = await self.recorder.assignment(self.policy)
        await self._note_switches(state)
        self._compare_since(state)
        await self._judge()
        state = await self.recorder.assignment(self.policy)
        await self._note_switches(state)
        await self._decide(state)
        if not state["frozen"] and (self.history.canary is None or self._may_give_way(state)):
            await self._update_if_due()
        await self._retire(state["open"])

    async def _note_switches(self, state: Mapping[str, Any]) -> None:
        """Writes each order of a person that the journal does not have yet, in order."""
        known = set(self.history.switches)
        for each in state["switches"]:
            if each["name"] in known:
                continue
            said = {"person": each["person"], "said_at": each["at"], "switch": each["name"]}
            order, about = each["order"], {"number": each["canary"]} if each["canary"] else {}
            if order in ("freeze", "thaw"):
                self._write(order, by="person", **said)
            else:
                self._write("order", order=order, by="person", **about, **said)
        if state["frozen"] != self.history.frozen:  # the recorder's file has been changed
            self._write("freeze" if state["frozen"] else "thaw", by="person")
        if state["switches"]:
            await self._assign()

    def _compare_since(self, state: Mapping[str, Any]) -> None:
        """Compares the sessions that were created since the canary, or a person's thaw."""
        is_new = state["since"] != self.history.compared_since
        if self.history.canary is not None and not state["frozen"] and is_new:
            self._write("compare", number=self.history.canary, since=state["since"])

    async def _judge(self) -> None:
        """Judges the sessions whose evidence is complete, and those again that a person has rated,
        or a rule marked, since."""
        due = []
        for view in await self.recorder.readable(self.policy):
            known = self.history.sessions.get(view["trial_id"])
            if known is not None and known["said"] == _said_of(view["rewards"], view["marks"]):
                continue
            try:
                session, turns = await self.recorder.record(self.policy, view["trial_id"])
            except ProxyClientError as error:
                if not _is_gone(error):
                    raise
                continue
            seen = Seen(session, turns, time.time())
            if is_due(seen, self.config.evidence):
                due.append(seen)
        ratios = await self._log_ratios(due)
        for seen in due:
            await self._judged(seen, ratios.get(seen.session.session_id))

    async def _log_ratios(self, due: Sequence[Seen]) -> Mapping[str, float]:
        """Of the sessions that are compared: log π_canary/π_stable, where it can be computed."""
        history, temperature = self.history, self.config.temperature
        found = [
            scored(
                *(each.session, each.turns, self.policy, temperature),
                reads_images=self.config.reads_images,
            )
            for each in due
            if self._is_compared(each)
        ]
        groups = []
        for group in (each for each in found if each is not None):
            try:
                groups.append(await self._with_pictures(group))
            except ProxyClientError as error:
                if not _is_gone(error):
                    raise
        if not groups or history.canary is None:
            return {}
        request = CompareAdapters(self.adapters, history.canary, history.stable, groups)
        try:
            return await self.rank_zero.ask(request)
        except TrainingError as error:  # an image that the trainer does not see as the engine did
            _log.warning("sessions are compared without their probabilities: %s", error)
            return {}

    def _is_compared(self, seen: Seen) -> bool:
        adapter = _adapter(seen.session, seen.turns, self.policy)
        return self.history.is_compared(adapter, seen.session.created_at)

    async def _judged(self, seen: Seen, log_ratio: float | None) -> None:
        found = await asyncio.to_thread(judged, seen, self.config.evidence)
        session = seen.session
        root = session.session_id if session.origin is None else session.origin.session_id
        held_out = _share(root) < self.config.update.held_out
        outcome, log_ratio = self._first_outcome(found, log_ratio)
        self._write(
            "session",
            session=session.session_id,
            created_at=session.created_at,
            adapter=_adapter(session, seen.turns, self.policy),
            value=found.value,
            turns={str(turn): value for turn, value in found.turns.items()},
            findings=found.findings,
            barred=found.barred,
            held_out=held_out,
            outcome=outcome,
            log_ratio=log_ratio,
            said=_said_of(
                [reward_fields(each) for each in session.rewards],
                [mark_fields(each) for each in session.marks],
            ),
        )
        self._untrainable.pop(session.session_id, None)
        line = self.history.sessions[session.session_id]
        await self._say(session.session_id, _text_of(line)[:MAX_VALUE_CHARS])

    def _first_outcome(
        self, found: Judged, log_ratio: float | None
    ) -> tuple[bool | None, float | None]:
        """The outcome and the log ratio that adapters are compared by, which stay: a test that is
        looked at any time must not change its past."""
        known = self.history.sessions.get(found.session_id)
        if known is not None and known["outcome"] is not None:
            return known["outcome"], known["log_ratio"]
        return _outcome(found), log_ratio

    async def _decide(self, state: Mapping[str, Any]) -> None:
        """Promotes the canary or rolls it back, if that is decided."""
        canary, order, frozen = self.history.canary, str(state["order"]), bool(state["frozen"])
        if canary is None:
            if order:  # what it was about is decided already
                await self._assign(done=order)
            return
        found, settings = self.history.comparison, self.config.canary
        verdict, by = found.verdict(settings.alpha, settings.max_sessions), "test"
        if order:
            verdict, by = ("promote" if order == "promote" else "rollback"), "person"
        elif frozen or verdict == "undecided" or state["since"] != self.history.compared_since:
            return
        elif verdict == "rollback" and found.worse < 1 / settings.alpha:
            by = "undecided"
        statistics = {"better": found.better, "worse": found.worse, "alpha": settings.alpha}
        harmful = verdict == "rollback" and by != "undecided"
        aside = {"set_aside": self.history.updates[canary]["sessions"]} if harmful else {}
        stable = self.history.stable
        counted = [line["session"] for line in self.history.compared]
        more = {**statistics, **aside, "compared": counted}
        self._write(verdict, number=canary, by=by, well=found.counts, **more)
        await self._assign(done=order)
        said = decided(verdict, canary, stable, by, found, settings.alpha)
        await self._tell(counted, said)

    def _may_give_way(self, state: Mapping[str, Any]) -> bool:
        """Whether the canary may be over without a decision, for one that has learned more."""
        settings, least = self.config.canary, self.config.update.sessions
        is_compared = state["since"] == self.history.compared_since
        little = self.history.comparison.says_little(settings.alpha, least)
        return settings.gives_way and is_compared and little

    async def _update_if_due(self) -> None:
        history, settings = self.history, self.config.update
        learned, parent = history.learned(history.stable), history.stable
        open_ = [
            name
            for name, line in history.sessions.items()
            if line["turns"] and not line["held_out"] and name not in history.set_aside
        ]
        fresh = [
            name
            for name in open_
            if name not in learned and self._untrainable.get(name) != history.stable
        ]
        if not self._are_enough(set(fresh) - history.tried):
            return
        number = history.last + 1
        again = [
            name
            for name in open_
            if name in learned and _share(f"{number}:{name}") < settings.replay
        ]
        groups, left_out = await self._groups([*fresh, *again])
        names = {group.group_id for group in groups}
        self._untrainable |= dict.fromkeys(set(fresh) - names, history.stable)
        if not groups or not self._are_enough(names.intersection(fresh) - history.tried):
            return
        tests = await self.held_out()
        request = UpdateAdapter(self.adapters, number, parent, groups, settings.bad, tests)
        batch = self.journal.keep_batch(number, groups)
        try:
            done = await self.rank_zero.ask(request)
        except TrainingError as error:
            self._write(
                "update",
                number=number,
                parent=parent,
                sessions=[n for n in fresh if n in names],
                replayed=[n for n in again if n in names],
                batch=batch,
                failed=str(error),
            )
            self._roll_back(number, "gate", [str(error)])
            return
        self._write(
            "update",
            number=number,
            parent=parent,
            sessions=[n for n in fresh if n in names],
            replayed=[n for n in again if n in names],
            left_out=dict(left_out),
            batch=batch,
            made_with=made_with(self.config),
            metrics={n: v for n, v in done.metrics.items() if n.startswith(("actor/", "kl/"))},
            **line_of_step(groups, done.evidence),
        )
        why = refusals(done.measures, self.config.gates)
        self._write("gate", number=number, passed=not why, measures=as_json(done.measures), why=why)
        if why:
            self._roll_back(number, "gate", why)
            said = f"refused by a gate: {'; '.join(why)}"
        else:
            await self._begin_canary(number)
            began = self.history.canary == number
            said = f"compared with {parent} from now on" if began else "not served"
        learned_by = self.history.updates[number]
        trained = [*learned_by["sessions"], *learned_by["replayed"]]
        await self._tell(trained, f"learned by adapter {number}, {said}")

    def _are_enough(self, sessions: Set[str]) -> bool:
        """Whether these new sessions are what an update waits for."""
        settings, judged_ = self.config.update, self.history.sessions
        good = sum(sum(judged_[name]["turns"].values()) > 0 for name in sessions)
        if good >= settings.good:
            return len(sessions) >= settings.sessions
        return settings.bad > 0 and len(sessions) >= settings.sessions * WITHOUT_GOOD

    async def held_out(self) -> list[Group]:
        """The sessions with evidence that are never trained, by which gates measure."""
        lines = self.history.sessions.items()
        groups, _ = await self._groups(
            [n for n, line in lines if line["held_out"] and line["turns"]]
        )
        return groups

    async def _begin_canary(self, number: int) -> None:
        try:
            await self._publish(number)
        except WeightSyncError as error:
            self._write("rollback", number=number, by="engine", why=[str(error)])
            return
        if self.history.canary is not None and not await self._still_gives_way():
            self._write("rollback", number=number, by="interrupted", why=[OVERTAKEN])
            return
        before, found = self.history.canary, self.history.comparison
        counted = [line["session"] for line in self.history.compared]
        stable, alpha = self.history.stable, self.config.canary.alpha
        self._write("canary", number=number, stable=stable, share=self.config.canary.share)
        if before is not None:  # after the line of the new one: at any time there is one
            more = {"better": found.better, "worse": found.worse, "alpha": alpha}
            about = {"well": found.counts, "compared": counted}
            self._write("rollback", number=before, by="newer", **more, **about)
        await self._assign()
        if before is not None:
            await self._tell(counted, decided("rollback", before, stable, "newer", found, alpha))

    async def _still_gives_way(self) -> bool:
        """Whether nothing was decided, or ordered by a person, while the update was computed."""
        state = await self.recorder.assignment(self.policy)
        await self._note_switches(state)
        return not state["order"] and not state["frozen"] and self._may_give_way(state)

    def _roll_back(self, number: int, by: str, why: Sequence[str]) -> None:
        aside, canary = self.history.updates[number]["sessions"], self.history.canary
        if canary is not None:  # what it learned has done no harm
            of_canary = self.history.learned(canary)
            aside = [name for name in aside if name not in of_canary]
        self._write("rollback", number=number, by=by, why=list(why), set_aside=aside)

    async def _groups(self, names: Sequence[str]) -> tuple[list[Group], Counter[str]]:
        """The sessions that may still be read, as groups, in order."""
        history, left_out = self.history, Counter[str]()
        lineage = Lineage(
            self.policy,
            history.ages(history.stable),
            self.config.update.max_staleness,
            self.config.temperature,
        )
        groups = []
        for name in names:
            try:
                session, turns = await self.recorder.record(self.policy, name)
                found = prepared(
                    *(session, turns, _of_line(history.sessions[name]), lineage, self._decode),
                    reads_images=self.config.reads_images,
                )
                group = found.group and await self._with_pictures(found.group)
            except ProxyClientError as error:
                if not _is_gone(error):
                    raise
                left_out["no longer there, or no longer opted in"] += 1
                continue
            left_out += found.left_out
            if group is not None:
                groups.append(group)
        return groups, left_out

    async def _with_pictures(self, group: Group) -> Group:
        """The group of a session with the bytes of its images, which the trainer compares with
        their names. Raises ProxyClientError: 404, it is no longer there, or no longer opted in."""
        fetch = partial(self.recorder.image_of, self.policy, group.group_id)
        rollouts = [await with_pictures(rollout, fetch) for rollout in group.rollouts]
        return replace(group, rollouts=tuple(rollouts))

    async def _serve_what_counts(self, state: Mapping[str, Any]) -> None:
        """Makes recorder and engines serve what the journal says, also after any of them was
        started again."""
        history = self.history
        for number in filter(None, (history.stable, history.canary)):
            if number not in self._served:
                await self._publish(number)
            else:  # it may be another vLLM since
                await asyncio.to_thread(self._load, self._served[number])
        wanted = (history.stable, history.canary)
        if (state["stable"], state["canary"]) != wanted:
            await self._assign()

    async def _publish(self, number: int) -> None:
        request = PublishAdapter(self.adapters, number, self.config.engines, self._probe)
        self._served[number] = name = await self.rank_zero.ask(request)
        await self.recorder.publish_adapter(self.policy, number, name)

    async def _assign(self, done: str = "") -> None:
        canary = self.history.canary
        share = 0.0 if canary is None else self.history.share
        told = self.history.switches[-1] if self.history.switches else ""
        await self.recorder.assign(
            self.policy,
            stable=self.history.stable,
            canary=canary,
            share=share,
            done=done,
            told=told,
        )

    async def _retire(self, open_sessions: Mapping[str, int]) -> None:
        """Unloads and deletes the served files of adapters that no open session has and no new one
        gets."""
        counted = {self.history.stable, self.history.canary, self.history.pending}
        kept = {f"{self.policy}-{number}" for number in counted} | open_sessions.keys()
        if kept != self._kept:
            await asyncio.to_thread(self._unload, kept)
            self._served = {n: v for n, v in self._served.items() if f"{self.policy}-{n}" in kept}
            self._kept = kept

    def _load(self, name: str) -> None:
        control = EngineControl(self.config.engines)
        try:
            control.load_adapter(name, (self.adapters.folder / SERVED / name).absolute())
        finally:
            control.close()

    def _unload(self, kept: Set[str]) -> None:
        def is_over(name: str) -> bool:
            policy = name.partition("@")[0]
            return policy.rpartition("-")[0] == self.policy and policy not in kept

        control = EngineControl(self.config.engines)
        try:
            control.unload_adapters(is_over)
        except WeightSyncError as error:
            _log.warning("old adapters stay loaded: %s", error)
        finally:
            control.close()
        for folder in (self.adapters.folder / SERVED).glob(f"{self.policy}-*@*"):
            if is_over(folder.name):
                shutil.rmtree(folder)

    async def _tell(self, sessions: Sequence[str], said: str) -> None:
        """Shows at each of these sessions why it was judged so, and what was decided with it."""
        said = said[: MAX_VALUE_CHARS * 3 // 4]
        for name in sessions:
            why = _text_of(self.history.sessions[name])
            await self._say(name, f"{why[: MAX_VALUE_CHARS - len(said) - 2]}; {said}")

    async def _say(self, session_id: str, text: str) -> None:
        try:
            await self.recorder.say(self.policy, session_id, text)
        except ProxyClientError as error:
            if not _is_gone(error):
                raise

    def _write(self, kind: str, **more: Any) -> None:
        self.history.take(self.journal.write(kind, **more))


def made_with(config: LearnConfig) -> dict[str, Any]:
    """The values that the weights of an adapter depend on, besides its parent and its batch."""
    update = config.update.model_dump(mode="json", include={"bad", "epochs", "kl"})
    return {
        "model": config.model.model_dump(mode="json", exclude={"path"}),
        "optimizer": config.optimizer.model_dump(mode="json"),
        "update": update,
        "temperature": config.temperature,
        "seed": config.seed,
    }


def _is_gone(error: ProxyClientError) -> bool:
    """Whether the session was removed, or has no longer opted in, since it was listed."""
    return error.status == 404


def decided(
    verdict: str, canary: int, stable: int, by: str, found: Comparison, alpha: float
) -> str:
    """What the page says of a decision, at each session that counted for it.

    Example: `counted for adapter 5 beside 3: promote by test; went well 9 of 10, 4 of 11; evidence
    that it is better 21.3, worse 0.2, of 20`
    """
    well = ", ".join(f"{good} of {count}" for good, count in found.counts.values())
    return (
        f"counted for adapter {canary} beside {stable}: {verdict} by {by}; went well {well};"
        f" evidence that it is better {found.better:.3g}, worse {found.worse:.3g}, of {1 / alpha:g}"
    )


def _of_line(line: Mapping[str, Any]) -> Judged:
    turns = {int(turn): value for turn, value in line["turns"].items()}
    findings = tuple(line["findings"])
    return Judged(line["session"], line["value"], turns, findings, line["barred"])


def _text_of(line: Mapping[str, Any]) -> str:
    """What the page says of a judged session."""
    found = _of_line(line)
    held = "held out, never trained; " if line["held_out"] and found.trains else ""
    return held + found.text


def _adapter(session: Session, turns: Sequence[Turn], policy: str) -> int | None:
    """The adapter that served the session; None: another policy, or several."""
    served = {adapter_of(turn, policy) for turn in turns if turn.sampled}
    return served.pop() if len(served) == 1 else None


def _outcome(found: Judged) -> bool | None:
    """Whether the session went well, for the comparison of adapters; None: there is no evidence."""
    total = found.value or sum(found.turns.values())
    return total > 0 if total else None


def _said_of(rewards: Sequence[Any], marks: Sequence[Any]) -> str:
    """A digest of the rewards and marks of a session, as JSON."""
    said = json.dumps([rewards, marks], sort_keys=True, default=str)
    return sha256(said.encode()).hexdigest()[:16]


def _share(name: str) -> float:
    """In [0, 1), the same for the same name."""
    return int.from_bytes(sha256(name.encode()).digest()[:8], "big") / 2**64


def _digest(config: Section) -> str:
    return sha256(config.model_dump_json().encode()).hexdigest()


def restrict_modes() -> None:
    """What this process writes is for its user alone."""
    os.umask(0o077)
