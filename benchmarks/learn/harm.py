"""What must not happen: a worse canary stays, poisoned evidence is served, a call is lost in a
swap, a forgotten session leaves a trace.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from pathlib import Path
from typing import Any

from benchmarks.learn import agent, world
from benchmarks.learn.daily import Show, User, learn_yaml, show
from trainer.extras.learn.command import learning
from trainer.extras.learn.rebuild import forget, proven, without
from trainer.extras.learn.update import UpdateAdapter

LONGEST_WAIT = 200
"""Sessions after which a scenario gives up."""


async def until(run: Show, happened: Any) -> int:
    """Sessions of daily work until something has happened; returns their number."""
    for count in range(LONGEST_WAIT):
        if happened():
            return count
        await run.session(len(run.outcomes))
    raise RuntimeError(f"it has not happened within {LONGEST_WAIT} sessions")


def kind_count(run: Show, kind: str) -> int:
    return sum(line["kind"] == kind for line in run.learner.journal.lines)


async def learned(run: Show) -> int:
    """Sessions until the first adapter, which is better, and is promoted by a person."""
    count = await until(run, lambda: run.learner.history.canary is not None)
    await run.order("promote")
    await run.learner.tick()
    return count


def decision(run: Show, number: int) -> dict[str, Any] | None:
    """The line that ended an adapter's canary; None: it is not decided."""
    for line in run.learner.journal.lines:
        if line["kind"] in ("rollback", "promote") and line["number"] == number:
            return line
    return None


async def worse(folder: Path, engine_url: str, seed: int) -> dict[str, Any]:
    """The user says the contrary until a canary has learned it; then the truth. Without the gates,
    which would stop it before."""
    more: dict[str, Any] = {
        "gates": {"least_held_out": 10_000, "max_kl": 1e6, "min_entropy": 0.0},
        "update": {"replay": 0.0},
    }
    user = User("conventional", random.Random(seed + 100))
    async with show(folder, engine_url, user, seed, **more) as run:
        count = await learned(run)
        history = run.learner.history
        stable = history.stable
        await until(run, lambda: history.canary is None)
        user.wrong = 1.0
        await until(run, lambda: history.canary is not None)
        canary = history.canary
        assert canary is not None
        user.wrong = 0.0
        rates = {n: await run.evaluate(n, 60) for n in (stable, canary)}
        sessions = await until(run, lambda: history.canary != canary)
        line = decision(run, canary)
        assert line is not None
        shown = {k: line[k] for k in ("kind", "by", "well", "worse")}
        bound = run.learner.config.canary.max_sessions
        return {"first": count, "rates": rates, "sessions": sessions, "bound": bound, **shown}


async def poison(folder: Path, engine_url: str, seed: int, batches: int) -> dict[str, Any]:
    """The user says the contrary until an adapter has learned mostly that, and the truth until it
    is decided, several times. The gates are those of everybody."""
    user = User("conventional", random.Random(seed + 100))
    async with show(folder, engine_url, user, seed) as run:
        await learned(run)
        history, found, wrong = run.learner.history, [], set[str]()
        before = await run.evaluate(history.stable, 60)

        def poisoned(after: int) -> int | None:
            """An adapter of which most new sessions are wrong."""
            for number, line in history.updates.items():
                own = line["sessions"]
                if number > after and len(wrong.intersection(own)) > len(own) / 2:
                    return number
            return None

        last = history.last
        for _ in range(batches):
            user.wrong = 1.0
            for _ in range(LONGEST_WAIT):
                if (number := poisoned(last)) is not None:
                    break
                wrong.add(f"day-{len(run.outcomes):04d}")
                await run.session(len(run.outcomes))
            else:
                raise RuntimeError("no batch was poisoned")
            user.wrong, last = 0.0, number
            sessions = await until(run, lambda n=number: decision(run, n) is not None)
            line = decision(run, number)
            assert line is not None
            found.append({"number": number, "sessions": sessions, "by": line["by"]})
            found[-1] |= {"kind": line["kind"], "why": line.get("why", [])}
            print(f"  {found[-1]}", flush=True)
        return {
            "poisoned": found,
            "promoted": sum(each["kind"] == "promote" for each in found),
            "before": before,
            "after": await run.evaluate(history.stable, 60),
            "sessions": len(run.outcomes),
        }


async def swaps(
    folder: Path, engine_url: str, seed: int, count: int = 20, users: int = 3
) -> dict[str, Any]:
    """Users who work all the time, while one adapter after the other is promoted."""
    more: dict[str, Any] = {
        "update": {"sessions": 1, "good": 0, "epochs": 1, "replay": 0.0},
        "optimizer": {"lr": 1.0e-4},
        "gates": {"max_kl": 1e6, "least_held_out": 10_000},  # ratings are random
        "evidence": ["rating"],
    }
    user = User("conventional", random.Random(seed), says=1.0)
    async with show(folder, engine_url, user, seed, **more) as run:
        stop, took, names = asyncio.Event(), [], []

        async def works(number: int) -> None:
            rng, day = random.Random(number), 0
            while not stop.is_set():
                day += 1
                name = f"user-{number}-{day}"
                place = folder / "work" / name
                world.new_repository(place)
                made = await run.control.create_session(name, metadata={"folder": str(place)})
                names.append(name)
                started = time.monotonic()
                calls = await agent.run(run.http, made, world.new_job(rng), place)
                run.calls += calls  # read after the wait, in which the other users count theirs
                took.append(time.monotonic() - started)
                await run.control.complete(name)
                await run.control.curate(name, value=float(rng.random() < 0.5))

        tasks = [asyncio.create_task(works(number)) for number in range(users)]
        promoted = 0
        while promoted < count:
            if any(task.done() for task in tasks):
                break  # a call has failed
            await run.learner.tick()
            if run.learner.history.canary is not None:
                await run.order("promote")
                await run.learner.tick()
                promoted = kind_count(run, "promote")
            await asyncio.sleep(0)
        stop.set()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        mixed, open_turns, adapters = [], 0, set()
        for name in names:
            _, turns = await run.control.get_turns(name)
            served = {(turn.policy, s.version) for turn in turns for s in turn.versions}
            adapters |= served
            mixed += [name] if len({policy for policy, _ in served}) > 1 else []
            open_turns += sum(turn.status.value != "done" for turn in turns)
        return {
            "swaps": promoted,
            "sessions": len(names),
            "calls": run.calls,
            "failed": [repr(each) for each in ended if isinstance(each, BaseException)],
            "served_by_two": mixed,
            "turns_not_done": open_turns,
            "adapters": len(adapters),
            "longest_session_s": round(max(took), 2),
        }


async def forgotten(folder: Path, engine_url: str, seed: int) -> dict[str, Any]:
    """Forgets sessions after two generations, and compares with another learner, in a folder of its
    own, that trains the recorded batches without them."""
    user = User("conventional", random.Random(seed + 100))
    async with show(folder, engine_url, user, seed) as run:
        for _ in range(2):
            await until(run, lambda: run.learner.history.canary is not None)
            await run.order("promote")
            await run.learner.tick()
        learner = run.learner
        line = [n for n in learner.history.ancestors(learner.history.stable) if n][::-1]
        gone = set(learner.history.updates[line[0]]["sessions"][:2])
        batches = [without(learner.journal.batch(number), gone) for number in line]
        for name in gone:
            await run.control.delete(name)
        done = await forget(learner, gone)
        await learner.tick()
        ours = learner.history.updates[learner.history.stable]["policies"][""]["weights"]
        proofs = await proven(learner)
        left = [
            str(path)
            for path in learner.config.folder.rglob("*")
            if path.is_file()
            for name in gone
            if name.encode() in path.read_bytes()
        ]
        url = run.control.base_url
    other = folder / "other"
    shutil.rmtree(other, ignore_errors=True)
    other.mkdir()
    async with learning(learn_yaml(other, url, engine_url, seed, run.agent.model)) as never:
        theirs = ""
        for number, groups in enumerate(batches, 1):
            bad = never.config.update.bad
            request = UpdateAdapter(never.adapters, number, number - 1, groups, bad)
            found = await never.rank_zero.ask(request)
            theirs = found.evidence.policies[""].weights
    return {
        "forgotten": sorted(gone),
        "rebuilt": dict(done.rebuilt),
        "equal": ours == theirs,
        "weights": ours,
        "proven": len(proofs),
        "traces_left": left,
    }
