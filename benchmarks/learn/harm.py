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
from benchmarks.learn.daily import Show, User, engine, learn_yaml, show
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


async def worse(folder: Path, seed: int) -> dict[str, Any]:
    """The user says the contrary until a canary has learned it; then the truth. Without the gate on
    held-out evidence, which would stop it before."""
    gates = {"least_held_out": 10_000}
    async with engine(folder, seed) as engine_url:
        user = User("conventional", random.Random(seed + 100))
        async with show(folder, engine_url, user, seed, gates=gates) as run:
            learned = await until(run, lambda: run.learner.history.stable > 0)
            stable = run.learner.history.stable
            await until(run, lambda: run.learner.history.canary is None)
            user.wrong = 1.0
            await until(run, lambda: run.learner.history.canary is not None)
            canary = run.learner.history.canary
            assert canary is not None
            user.wrong = 0.0
            rates = {n: await run.evaluate(n, 40) for n in (stable, canary)}
            sessions = await until(run, lambda: run.learner.history.canary != canary)
            line = next(
                each
                for each in run.learner.journal.lines
                if each["kind"] in ("rollback", "promote") and each["number"] == canary
            )
            shown = {k: line[k] for k in ("kind", "by", "won", "lost", "pairs", "worse")}
            return {"learned_after": learned, "rates": rates, "sessions": sessions, **shown}


async def poison(folder: Path, seed: int, batches: int = 5) -> dict[str, Any]:
    """The user says the contrary, batch after batch; the gates are those of everybody."""
    async with engine(folder, seed) as engine_url:
        user = User("conventional", random.Random(seed + 100))
        async with show(folder, engine_url, user, seed) as run:
            await until(run, lambda: run.learner.history.stable > 0)
            await until(run, lambda: run.learner.history.canary is None)
            before, canaries = kind_count(run, "update"), kind_count(run, "canary")
            user.wrong = 1.0
            await until(run, lambda: kind_count(run, "update") >= before + batches)
            refused = [
                line["why"]
                for line in run.learner.journal.lines
                if line["kind"] == "gate" and line["number"] > before and not line["passed"]
            ]
            served = kind_count(run, "canary") - canaries
            return {"poisoned": batches, "refused": len(refused), "served": served, "why": refused}


async def swaps(folder: Path, seed: int, count: int = 20, users: int = 3) -> dict[str, Any]:
    """Users who work all the time, while one adapter after the other is promoted."""
    more = {"update": {"sessions": 1, "epochs": 1}, "evidence": ["rating"]}
    async with engine(folder, seed) as engine_url:
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
                    run.calls += await agent.run(run.http, made, world.new_job(rng), place)
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


async def forgotten(folder: Path, seed: int) -> dict[str, Any]:
    """Forgets sessions after two generations, and compares with another learner, in a folder of its
    own, that trains the recorded batches without them."""
    async with engine(folder, seed) as engine_url:
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
    async with learning(learn_yaml(other, url, engine_url, seed)) as never:
        theirs = ""
        for number, groups in enumerate(batches, 1):
            request = UpdateAdapter(never.adapters, number, number - 1, groups)
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
