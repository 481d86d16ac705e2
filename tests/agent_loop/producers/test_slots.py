"""While an evaluation runs, no trial of training starts; what is trained stays the same."""

from __future__ import annotations

import asyncio

from agent_loop.producers.rollout_config import RolloutConfig
from agent_loop.producers.slots import TrialSlots
from tests.agent_loop.producers.test_asynchronous import content, long_tailed, producing
from tests.agent_loop.scripted_loop import ScriptedLoop
from tests.agent_loop.virtual_time import run_in_virtual_time

EVALUATION_S = 50.0


def test_paused_slots_let_nobody_in_and_keep_the_order() -> None:
    entered: list[int] = []

    async def trial(number: int, slots: TrialSlots) -> None:
        async with slots:
            entered.append(number)
            await asyncio.sleep(10.0)

    async def main() -> None:
        slots = TrialSlots(2)
        async with asyncio.TaskGroup() as trials:
            for number in range(6):
                trials.create_task(trial(number, slots))
            await asyncio.sleep(5.0)
            slots.pause()
            await asyncio.sleep(100.0)
            assert entered == [0, 1]  # which have ended: both slots are free
            slots.resume()

    run_in_virtual_time(main())
    assert entered == [0, 1, 2, 3, 4, 5]


def test_trial_that_waits_for_a_slot_can_be_cancelled_while_paused() -> None:
    async def main() -> None:
        slots = TrialSlots(1)
        slots.pause()
        waiting = asyncio.create_task(slots.acquire())
        await asyncio.sleep(1.0)
        waiting.cancel()
        await asyncio.wait([waiting])
        slots.resume()
        assert await slots.acquire()

    run_in_virtual_time(main())


def test_evaluation_starts_no_trial_and_changes_no_batch() -> None:
    policy = RolloutConfig(groups_per_step=3, group_size=3, max_staleness=0, concurrency=4)

    def batches(evaluates: bool) -> list[list[bytes]]:
        loop = ScriptedLoop(duration=long_tailed)

        async def main() -> list[list[bytes]]:
            taken = []
            async with producing(loop, policy) as producer:
                producer.start(0)
                for version in range(5):
                    taken.append(await producer.next_batch(version))
                    producer.set_version(version + 1)
                    if evaluates:
                        await asyncio.sleep(0.0)  # the next batch's first trials start
                        producer.pause()
                        before = loop.started
                        await asyncio.sleep(EVALUATION_S)
                        assert loop.started == before < 9 * (version + 2)
                        producer.resume()
            return content(taken)

        return run_in_virtual_time(main())

    assert batches(evaluates=True) == batches(evaluates=False)
