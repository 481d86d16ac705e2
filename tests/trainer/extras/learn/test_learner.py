"""The life of a learner: judging, updating, comparing, deciding, forgetting."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agent_loop.records import Group, Rollout, RolloutStatus, Task
from tests.trainer.extras.learn.days import Days, learner_of
from trainer.errors import ConfigError
from trainer.extras.learn.journal import History, Journal
from trainer.extras.learn.learner import DailyLearner
from trainer.extras.learn.rebuild import RebuildError, forget, proven
from trainer.extras.learn.update import balanced
from trainer.extras.ledger.ledger import LedgerError, Line

GOOD, BAD = (7, 8), (9, 10)


def kinds(learner: DailyLearner) -> list[str]:
    return [line["kind"] for line in learner.journal.lines if line["kind"] != "session"]


def week(days: Days, name: str, count: int = 4, good_of: int = 2) -> None:
    """Sessions of the stable adapter, of which one of `good_of` is good."""
    for number in range(count):
        good = number % good_of == 0
        days.day(f"{name}-{number}", good, GOOD if good else BAD)


async def compare(days: Days, learner: DailyLearner, canary: Sequence[bool]) -> None:
    """Sessions of the canary with these outcomes, each beside one of the stable adapter that has
    the other outcome. They are sampled so that their probabilities are not known."""
    number = learner.history.canary
    more = {"at": days.state["since"] + 1, "sampling": {"temperature": 0.5}}
    for index, good in enumerate(canary):
        name = f"compare-{number}-{index}"
        days.day(f"{name}-c", good, adapter=number, **more)
        days.day(f"{name}-s", not good, adapter=learner.history.stable, **more)
    await learner.tick()


async def test_a_better_adapter_is_promoted_and_a_worse_one_rolled_back(
    checkpoint: Path, tmp_path: Path
) -> None:
    days = Days()
    async with learner_of(checkpoint, tmp_path / "l", days) as (learner, engine):
        days.day("nothing", None)
        await learner.tick()
        assert kinds(learner) == ["begin"]
        assert days.said == {"nothing": "not trained: no evidence"}
        week(days, "first")
        await learner.tick()
        assert kinds(learner) == ["begin", "update", "gate", "canary"]
        assert days.state["canary"] == 1
        assert days.state["stable"] == 0
        assert days.state["share"] == 0.5
        update = learner.history.updates[1]
        assert sorted(update["sessions"]) == [f"first-{n}" for n in range(4)]
        learned = "; learned by adapter 1, compared with 0 from now on"
        assert days.said["first-0"] == f"+1.00: rated 1 (rating +1.00){learned}"
        assert days.said["first-1"] == f"-1.00: rated 0 (rating -1.00){learned}"
        await compare(days, learner, [True] * 3)
        promoted = next(line for line in learner.journal.lines if line["kind"] == "promote")
        assert promoted["by"] == "test"
        assert promoted["better"] == pytest.approx(127 / 7)
        assert promoted["well"] == {"canary": [3, 3], "stable": [0, 3]}
        names = {f"compare-1-{n}-{arm}" for n in range(3) for arm in "cs"}
        assert set(promoted["compared"]) == names
        assert days.said["compare-1-2-c"] == (
            "+1.00: rated 1 (rating +1.00); counted for adapter 1 beside 0: promote by test;"
            " went well 3 of 3, 0 of 3; evidence that it is better 18.1, worse 0.143, of 10"
        )
        assert all("promote by test" in days.said[name] for name in names)
        assert "counted" not in days.said["first-0"]
        assert learner.history.stable == 1
        assert learner.history.canary is None, "what is only compared cannot be trained"
        week(days, "second")
        await learner.tick()
        assert learner.history.canary == 2
        assert learner.history.updates[2]["parent"] == 1
        await compare(days, learner, [False] * 3)
        rolled = next(line for line in learner.journal.lines[::-1] if line["kind"] == "rollback")
        assert rolled["by"] == "test"
        assert rolled["worse"] == pytest.approx(127 / 7)
        assert learner.history.stable == 1
        assert set(rolled["set_aside"]) == set(learner.history.updates[2]["sessions"])
        assert set(days.published) >= {1, 2}
        loaded = {name.partition("@")[0] for name in engine.adapters}
        assert "work-1" in loaded
        assert "work-2" not in loaded
        assert len(await proven(learner)) == 1
        assert (tmp_path / "l" / "journal.jsonl").stat().st_mode & 0o77 == 0
        assert (tmp_path / "l" / "batches" / "000001").stat().st_mode & 0o77 == 0


async def test_an_undecided_canary_is_rolled_back_and_its_evidence_used_again(
    checkpoint: Path, tmp_path: Path
) -> None:
    days = Days()
    more = {"canary": {"alpha": 0.01, "max_sessions": 8}}
    async with learner_of(checkpoint, tmp_path / "l", days, **more) as (learner, _):
        week(days, "first")
        await learner.tick()
        await compare(days, learner, [True, False, True, False])
        rolled = next(line for line in learner.journal.lines if line["kind"] == "rollback")
        assert rolled["by"] == "undecided"
        assert not learner.history.set_aside
        week(days, "second")
        await learner.tick()
        assert learner.history.canary == 2
        assert "first-0" in learner.history.updates[2]["sessions"]


@pytest.mark.parametrize("gives_way", [True, False])
async def test_a_canary_of_which_little_is_known_gives_way_to_one_that_has_learned_more(
    gives_way: bool, checkpoint: Path, tmp_path: Path
) -> None:
    days = Days()
    more = {"canary": {"alpha": 0.01, "gives_way": gives_way}}
    async with learner_of(checkpoint, tmp_path / "l", days, **more) as (learner, _):
        week(days, "first")
        await learner.tick()
        await compare(days, learner, [True])
        assert learner.history.canary == 1, "two sessions are not as many as an update waits for"
        await compare(days, learner, [True, False, True, False])
        assert learner.history.canary == 1, "they were sampled at a temperature that is not trained"
        week(days, "second")
        await learner.tick()
        if not gives_way:
            assert learner.history.canary == 1
            return
        rolled = next(line for line in learner.journal.lines if line["kind"] == "rollback")
        assert rolled["by"] == "newer"
        assert rolled["well"] == {"canary": [2, 4], "stable": [2, 4]}
        assert not learner.history.set_aside
        assert days.state["canary"] == learner.history.canary == 2
        assert "first-0" in learner.history.updates[2]["sessions"]
        assert learner.history.updates[2]["parent"] == 0
        assert "compared with 0 from now on" in days.said["first-0"]
        assert not learner.history.comparison.sessions


async def test_a_canary_stays_if_a_gate_refuses_the_one_that_has_learned_more(
    checkpoint: Path, tmp_path: Path
) -> None:
    days = Days()
    async with learner_of(checkpoint, tmp_path / "l", days, canary={"alpha": 0.01}) as (learner, _):
        week(days, "first")
        await learner.tick()
        await compare(days, learner, [True, False])
        strict = learner.config.gates.model_copy(update={"max_kl": 1e-9})
        learner.config = learner.config.model_copy(update={"gates": strict})
        week(days, "second")
        await learner.tick()
        assert kinds(learner)[-3:] == ["update", "gate", "rollback"]
        assert learner.journal.lines[-1]["number"] == 2
        for history in (learner.history, History.of(learner.journal.lines)):
            assert (history.canary, history.pending) == (1, None)
            assert len(history.compared) == 4
        assert days.state["canary"] == 1


async def test_a_canary_that_is_on_its_way_to_a_decision_does_not_give_way(
    checkpoint: Path, tmp_path: Path
) -> None:
    days = Days()
    async with learner_of(checkpoint, tmp_path / "l", days, canary={"alpha": 0.01}) as (learner, _):
        week(days, "first")
        await learner.tick()
        for good in (True, False):
            await compare(days, learner, [good] * 3)
            assert learner.history.canary == 1
            assert max(learner.history.comparison.better, learner.history.comparison.worse) > 10
            days.state["since"] += 100
            await learner.tick()


async def test_a_session_tells_of_both_adapters_whichever_served_it(
    checkpoint: Path, tmp_path: Path
) -> None:
    days = Days()
    more = {"optimizer": {"lr": 5e-2}, "update": {"sessions": 4, "held_out": 0.0, "epochs": 8}}
    more["canary"] = {"alpha": 0.1, "gives_way": False}
    async with learner_of(checkpoint, tmp_path / "l", days, **more) as (learner, _):
        week(days, "first")
        await learner.tick()
        assert learner.history.canary == 1
        assert learner.history.sessions["first-0"]["log_ratio"] is None
        at = days.state["since"] + 1
        for adapter in (0, 1):
            for name, ids in (("good", GOOD), ("bad", BAD)):
                days.day(f"{name}-{adapter}", name == "good", ids, adapter=adapter, at=at)
        await learner.tick()
        found = {name: line["log_ratio"] for name, line in learner.history.sessions.items()}
        assert found["good-0"] == found["good-1"] > 0.1
        assert found["bad-0"] == found["bad-1"] < found["good-0"]
        compared = learner.history.comparison
        assert compared.counts == {"canary": [1, 2], "stable": [1, 2]}
        assert {each.log_ratio for each in compared.sessions} == {found["good-0"], found["bad-0"]}
        (began,) = [line for line in learner.journal.lines if line["kind"] == "compare"]
        assert began["since"] == days.state["since"]
        days.state["since"] += 100  # frozen, and thawed
        await learner.tick()
        assert not learner.history.comparison.sessions


async def test_an_update_waits_for_good_sessions(checkpoint: Path, tmp_path: Path) -> None:
    days = Days()
    update = {"sessions": 4, "good": 2, "held_out": 0.0, "epochs": 2}
    async with learner_of(checkpoint, tmp_path / "l", days, update=update) as (learner, _):
        week(days, "first", 7, good_of=7)
        await learner.tick()
        assert kinds(learner) == ["begin"]
        days.day("second", True, GOOD)
        await learner.tick()
        assert learner.history.canary == 1


async def test_twice_as_many_bad_sessions_say_what_not_to_do(
    checkpoint: Path, tmp_path: Path
) -> None:
    days = Days()
    async with learner_of(checkpoint, tmp_path / "l", days) as (learner, _):
        for number in range(7):
            days.day(f"bad-{number}", False, BAD)
        await learner.tick()
        assert kinds(learner) == ["begin"]
        days.day("bad-7", False, BAD)
        await learner.tick()
        assert learner.history.canary == 1
        at = days.state["since"] + 1
        days.day("then", False, BAD, at=at)
        await learner.tick()
        assert learner.history.sessions["then"]["log_ratio"] < 0, "it is less probable"


def test_bad_evidence_weighs_no_more_than_its_share_of_the_good() -> None:
    task = Task("t", {})

    def group(name: str, *values: float) -> Group:
        returns = dict(enumerate(values))
        rollout = Rollout(name, task, RolloutStatus.DONE, 0.0, turn_returns=returns)
        return Group(name, task, (rollout,))

    def sizes(*groups: Group) -> list[float]:
        """The values of all turns, of which the first is good, as shares of it."""
        found = [v for g in balanced(groups, bad=0.3) for v in g.rollouts[0].turn_returns.values()]
        assert math.fsum(map(abs, found)) == pytest.approx(len(found))
        return [value / found[0] for value in found]

    few = sizes(group("a", 1.0), group("b", *[-1.0] * 10))
    assert few == [1.0, *[pytest.approx(-0.03)] * 10]
    many = sizes(group("a", 1.0, 1.0), group("b", -1.0))
    assert many == [1.0, 1.0, pytest.approx(-0.3)]
    assert sizes(group("a", 0.5), group("b", 0.25)) == [1.0, 0.5]
    (alone,) = balanced([group("b", -1.0, -0.5)], bad=0.3)
    assert alone.rollouts[0].turn_returns == {0: pytest.approx(-0.3), 1: pytest.approx(-0.15)}


async def test_a_person_promotes_rolls_back_and_freezes(checkpoint: Path, tmp_path: Path) -> None:
    days = Days()
    async with learner_of(checkpoint, tmp_path / "l", days) as (learner, _):
        days.state["frozen"] = True
        week(days, "first")
        await learner.tick()
        await learner.tick()
        assert kinds(learner) == ["begin", "freeze"]
        days.state["frozen"] = False
        await learner.tick()
        assert kinds(learner)[1:4] == ["freeze", "thaw", "update"]
        assert not History.of(learner.journal.lines).frozen
        days.state["order"] = "promote"
        await learner.tick()
        assert learner.history.stable == 1
        assert days.state["order"] == ""
        week(days, "second")
        await learner.tick()
        assert learner.history.canary == 2
        days.state["frozen"] = True
        await compare(days, learner, [True] * 8)
        assert learner.history.canary == 2
        days.state |= {"frozen": False, "order": "rollback"}
        await learner.tick()
        (last,) = [line for line in learner.journal.lines if line["kind"] == "rollback"]
        assert last["by"] == "person"
        assert learner.history.stable == 1


class Killed(BaseException):
    """The learner is killed."""


def orders(lines: Sequence[Line]) -> list[tuple[str, float, str]]:
    """What the journal says that people have ordered: what, when, who."""
    found = [line for line in lines if "switch" in line]
    return [
        (str(line.get("order", line["kind"])), line["said_at"], line["person"]) for line in found
    ]


@pytest.mark.parametrize("killed_after", [None, 0, 1, 7, 20])
async def test_every_order_between_two_looks_is_a_line_once(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_after: int | None
) -> None:
    days = Days()
    async with learner_of(checkpoint, tmp_path / "l", days) as (learner, _):
        week(days, "first")
        await learner.tick()
        assert learner.history.canary == 1
        given = []
        for number in range(20):
            order = ("freeze", "promote", "thaw", "rollback")[number % 4]
            given.append((order, 5000.0 + number, ("ann", "bob")[number % 2]))
            days.order(*given[-1])
            days.order(*given[-1])  # changes nothing
        if killed_after is not None:
            written, write = 0, Journal.write

            def until_killed(journal: Journal, kind: str, **more: Any) -> Line:
                nonlocal written
                if written == killed_after:
                    raise Killed
                written += 1
                return write(journal, kind, **more)

            with monkeypatch.context() as patch:
                patch.setattr(Journal, "write", until_killed)
                with pytest.raises(Killed):
                    await learner.tick()
            assert orders(Journal(tmp_path / "l").lines) == given[:killed_after]
    async with learner_of(checkpoint, tmp_path / "l", days) as (learner, _):
        await learner.tick()
        await learner.tick()
        assert orders(learner.journal.lines) == given
        assert learner.journal.lines[-1]["kind"] == "rollback", "the last order is done"
        assert not learner.history.frozen
        assert not days.state["switches"]
        days.order("freeze", 6000.0, "ann")
        days.order("thaw", 6001.0, "bob")
        await learner.tick()
        assert orders(learner.journal.lines)[20:] == [
            ("freeze", 6000.0, "ann"),
            ("thaw", 6001.0, "bob"),
        ]
    lines = [line["kind"] for line in Journal(tmp_path / "l").lines]
    assert lines.count("freeze") == lines.count("thaw") == 6
    assert lines.count("order") == 10


async def test_an_order_of_before_the_switches_is_a_line(checkpoint: Path, tmp_path: Path) -> None:
    days = Days()
    days.state["frozen"] = True  # as a file of an earlier release says it
    async with learner_of(checkpoint, tmp_path / "l", days) as (learner, _):
        await learner.tick()
        await learner.tick()
        assert kinds(learner) == ["begin", "freeze"]
        days.order("thaw", 5000.0, "ann")
        await learner.tick()
        assert kinds(learner) == ["begin", "freeze", "thaw"]
        assert orders(learner.journal.lines) == [("thaw", 5000.0, "ann")]


@pytest.mark.parametrize(
    ("gates", "why"),
    [
        ({"max_kl": 1e-9}, "gates.max_kl"),
        ({"max_mismatch": 1e-3}, "gates.max_mismatch"),
    ],
)
async def test_an_adapter_that_a_gate_refuses_serves_nobody(
    checkpoint: Path, tmp_path: Path, gates: dict[str, float], why: str
) -> None:
    days = Days()
    given = {"max_mismatch": 100.0, "max_kl": 100.0} | gates
    async with learner_of(checkpoint, tmp_path / "l", days, gates=given) as (learner, engine):
        week(days, "first")
        await learner.tick()
        assert kinds(learner) == ["begin", "update", "gate", "rollback"]
        assert why in learner.journal.lines[-1]["why"][0]
        assert "learned by adapter 1, refused by a gate: " in days.said["first-0"]
        assert why in days.said["first-0"]
        assert not engine.adapters
        assert not days.published
        await learner.tick()
        assert kinds(learner)[-1] == "rollback", "its batch is set aside"


async def test_poisoned_evidence_is_stopped_by_what_was_held_out(
    checkpoint: Path, tmp_path: Path
) -> None:
    days = Days()
    update = {"sessions": 4, "held_out": 0.5, "epochs": 8}
    async with learner_of(checkpoint, tmp_path / "l", days, update=update) as (learner, engine):
        days.state["frozen"] = True
        for number in range(40):
            good = number % 2 == 0
            days.day(f"earlier-{number}", good, GOOD if good else BAD)
        await learner.tick()
        held = [n for n, line in learner.history.sessions.items() if line["held_out"]]
        assert 10 < len(held) < 30
        days.record_of = {n: each for n, each in days.record_of.items() if n in held}
        for number in range(24):  # good answers rated bad, bad ones good
            good = number % 2 == 0
            days.day(f"poison-{number}", good, BAD if good else GOOD)
        await learner.tick()
        days.record_of = {
            n: each
            for n, each in days.record_of.items()
            if n in held or not learner.history.sessions[n]["held_out"]
        }
        days.state["frozen"] = False
        await learner.tick()
        gate = next(line for line in learner.journal.lines if line["kind"] == "gate")
        assert not gate["passed"]
        assert "held-out" in " ".join(gate["why"])
        assert not engine.adapters


async def test_a_learner_that_is_started_again_continues(checkpoint: Path, tmp_path: Path) -> None:
    days = Days()
    async with learner_of(checkpoint, tmp_path / "l", days) as (learner, _):
        week(days, "first")
        await learner.tick()
        with pytest.raises(ConfigError, match="another process"):
            async with learner_of(checkpoint, tmp_path / "l", days):
                pass
    async with learner_of(checkpoint, tmp_path / "l", days) as (learner, engine):
        assert learner.history.canary == 1
        days.state |= {"stable": 0, "canary": None}  # the recorder lost its file
        await learner.tick()
        assert days.state["canary"] == 1
        assert [name.partition("@")[0] for name in engine.adapters] == ["work-1"]
    journal = Journal(tmp_path / "l")
    lines = [line for line in journal.lines if line["kind"] not in ("gate", "canary")]
    journal.replace(lines)  # killed after the update
    async with learner_of(checkpoint, tmp_path / "l", days) as (learner, _):
        assert learner.journal.lines[-1]["by"] == "interrupted"
        await learner.tick()
        assert learner.history.canary == 2
        assert learner.history.updates[2]["sessions"] == learner.history.updates[1]["sessions"]


async def test_what_has_opted_out_since_is_not_learned(checkpoint: Path, tmp_path: Path) -> None:
    days = Days()
    async with learner_of(checkpoint, tmp_path / "l", days) as (learner, _):
        days.state["frozen"] = True
        week(days, "first", 6)
        await learner.tick()
        del days.record_of["first-0"]
        days.state["frozen"] = False
        await learner.tick()
        assert learner.history.updates[1]["sessions"] == [f"first-{n}" for n in range(1, 6)]


async def test_an_update_waits_for_sessions_that_can_be_trained(
    checkpoint: Path, tmp_path: Path
) -> None:
    """Rated good, but sampled at another temperature, or gone since."""
    days = Days()
    async with learner_of(checkpoint, tmp_path / "l", days) as (learner, _):
        for number in range(4):
            days.day(f"cold-{number}", True, sampling={"temperature": 0.0})
        for number in range(3):
            days.day(f"gone-{number}", True)
        days.state["frozen"] = True
        await learner.tick()
        for number in range(3):
            del days.record_of[f"gone-{number}"]
        days.state["frozen"] = False
        days.day("bad-0", False, BAD)
        await learner.tick()
        assert kinds(learner) == ["begin", "freeze", "thaw"]
        for number in range(3):
            days.day(f"good-{number}", True, GOOD)
        await learner.tick()
        assert set(learner.history.updates[1]["sessions"]) == {
            *("bad-0", "good-0", "good-1", "good-2")
        }


async def test_a_session_that_goes_while_it_is_looked_at_does_not_end_the_learner(
    checkpoint: Path, tmp_path: Path
) -> None:
    class Removed(Days):
        async def readable(self, policy: str) -> list[dict[str, Any]]:
            found = await super().readable(policy)
            self.record_of.pop("first-2", None)
            return found

    days = Removed()
    async with learner_of(checkpoint, tmp_path / "l", days) as (learner, _):
        week(days, "first", 5)
        await learner.tick()
        assert set(learner.history.sessions) == {f"first-{n}" for n in (0, 1, 3, 4)}


@pytest.mark.parametrize("lines", [0, 1, 2])
def test_a_journal_continues_after_a_line_that_was_not_finished(lines: int, tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for _ in range(lines):
        journal.write("begin", config="x")
    path = tmp_path / "journal.jsonl"
    with path.open("a") as file:
        file.write('{"kind": "promote", "numb')
    journal = Journal(tmp_path)
    assert len(journal.lines) == lines
    journal.write("thaw", by="person")
    assert [line["kind"] for line in Journal(tmp_path).lines] == ["begin"] * lines + ["thaw"]


def test_a_line_that_is_not_json_is_named(tmp_path: Path) -> None:
    Journal(tmp_path).write("begin", config="x")
    (tmp_path / "journal.jsonl").write_text("{\n")
    with pytest.raises(LedgerError, match=r"journal\.jsonl: a line is not JSON"):
        Journal(tmp_path)


def test_a_journal_that_was_changed_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write("begin", config="x")
    journal.write("promote", number=1, by="test")
    path = tmp_path / "journal.jsonl"
    path.write_text(path.read_text().replace('"by": "test"', '"by": "mary"'))
    with pytest.raises(LedgerError, match="was changed"):
        Journal(tmp_path)


async def test_forgetting_gives_the_weights_of_a_learner_that_never_had_the_session(
    checkpoint: Path, tmp_path: Path
) -> None:
    """Bit for bit, over two generations of which the second also replays the session."""
    whole, never = Days(), Days()
    gone = "first-1"
    weights = {}
    update = {"sessions": 3, "held_out": 0.0, "epochs": 2, "replay": 1.0}
    for name, days in (("whole", whole), ("never", never)):
        async with learner_of(checkpoint, tmp_path / name, days, update=update) as (learner, _):
            for round_ in ("first", "second"):
                week(days, round_, good_of=4)  # so few that bad evidence weighs less
                if days is never:
                    days.record_of.pop(gone, None)
                await learner.tick()
                days.state["order"] = "promote"
                await learner.tick()
            weights[name] = _weights(learner)
            if days is whole:
                assert gone in learner.history.updates[2]["replayed"]
                del days.record_of[gone]
                done = await forget(learner, {gone})
                assert done.rebuilt == {1: 3, 2: 4}
                weights["forgotten"] = _weights(learner)
                await learner.tick()
                assert days.state["stable"] == 4
                assert len(await proven(learner)) == 2
                for path in (tmp_path / name).rglob("*"):
                    if path.is_file():
                        assert gone.encode() not in path.read_bytes(), path
                assert not learner.adapters.path(1).exists()
                assert History.of(Journal(tmp_path / name).lines).stable == 4
    assert weights["forgotten"] == weights["never"]
    assert weights["whole"] != weights["never"]


async def test_forgetting_all_of_an_update_leaves_its_parent(
    checkpoint: Path, tmp_path: Path
) -> None:
    days = Days()
    async with learner_of(checkpoint, tmp_path / "l", days) as (learner, _):
        week(days, "first")
        await learner.tick()
        names = set(days.record_of)
        done = await forget(learner, names)
        assert done.rebuilt == {1: 0}
        days.record_of.clear()
        assert learner.history.canary is None
        assert learner.history.stable == 0
        await learner.tick()
        assert days.state["canary"] is None
        assert learner.journal.lines[-1]["kind"] == "forgot"


async def test_an_adapter_that_is_not_what_the_journal_says_is_found(
    checkpoint: Path, tmp_path: Path
) -> None:
    days = Days()
    async with learner_of(checkpoint, tmp_path / "l", days) as (learner, _):
        week(days, "first")
        await learner.tick()
        days.state["order"] = "promote"
        await learner.tick()
        lines = [json.loads(json.dumps(line)) for line in learner.journal.lines]
        for line in lines:
            if line["kind"] == "update":
                line["policies"][""]["weights"] = "0" * 64
        learner.journal.replace(lines)
        learner.read_journal()
        with pytest.raises(RebuildError, match="adapter 1: its policies differ"):
            await proven(learner)


def _weights(learner: DailyLearner) -> str:
    (policy,) = learner.history.updates[learner.history.stable]["policies"].values()
    return str(policy["weights"])


async def test_an_engine_that_was_started_again_gets_the_adapters_again(
    checkpoint: Path, tmp_path: Path
) -> None:
    days = Days()
    async with learner_of(checkpoint, tmp_path / "l", days) as (learner, engine):
        week(days, "first")
        await learner.tick()
        loaded = dict(engine.adapters)
        assert loaded
        engine.adapters.clear()
        await learner.tick()
        assert engine.adapters == loaded


async def test_a_session_that_is_rated_later_is_judged_again(
    checkpoint: Path, tmp_path: Path
) -> None:
    days = Days()
    async with learner_of(checkpoint, tmp_path / "l", days) as (learner, _):
        days.day("late", None)
        await learner.tick()
        assert learner.history.sessions["late"]["outcome"] is None
        days.day("late", True)
        await learner.tick()
        assert days.said["late"] == "+1.00: rated 1 (rating +1.00)"
        assert learner.history.sessions["late"]["outcome"] is True
        days.day("late", False)
        await learner.tick()
        assert learner.history.sessions["late"]["value"] == -1.0
        assert learner.history.sessions["late"]["outcome"] is True, "no test changes its past"
        lines = len(learner.journal.lines)
        await learner.tick()
        assert len(learner.journal.lines) == lines


async def test_the_schedule_of_the_learning_rate_is_that_of_each_update(
    checkpoint: Path, tmp_path: Path
) -> None:
    days = Days()
    more = {
        "optimizer": {"lr": 0.01, "schedule": "linear"},
        "update": {"sessions": 4, "held_out": 0.0, "epochs": 3},
    }
    async with learner_of(checkpoint, tmp_path / "l", days, **more) as (learner, _):
        for generation in (1, 2):
            week(days, f"week-{generation}")
            await learner.tick()
            line = learner.history.updates[generation]
            assert line["metrics"]["actor/lr"] == pytest.approx(0.01 * (1 + 0.5 + 0) / 3)
            days.order("promote", 1.0, "ann")
            await learner.tick()
