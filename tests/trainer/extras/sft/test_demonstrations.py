"""Which recorded sessions become demonstrations, and which of their tokens are trained."""

from __future__ import annotations

import asyncio
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from agent_loop.records import Group, Task
from agent_loop.trajectory import flatten
from proxy.cli import main as proxy_main
from proxy.config import RenderingConfig
from proxy.records import Session, Turn
from tests.trainer.extras.sft.recorded import (
    exact_turns,
    rendering_of,
    sample_of,
    text_turns,
    write_sessions,
)
from trainer.algorithms import Algorithm, AlgorithmConfig
from trainer.batch import build_batch
from trainer.errors import ConfigError, TrainingError
from trainer.extras.sft.config import SftConfig
from trainer.extras.sft.demonstrations import Demonstrations, demonstration, read_demonstrations
from trainer.extras.sft.fit import batch_of
from trainer.extras.sft.schedule import Schedule, split

CONTEXT_TOKENS = 2048


@pytest.fixture(scope="module")
def store(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine sessions on exact ids with the rewards 0 1 1 0 1 1 0 1 1, and a text-only one."""
    file = tmp_path_factory.mktemp("collected") / "sessions.db"
    asyncio.run(write_sessions(file, tiny_model, 9))
    return file


def selected(model: Path, *sessions: object, **settings: object) -> Demonstrations:
    config = SftConfig.model_validate({"sessions": [str(each) for each in sessions], **settings})
    return asyncio.run(read_demonstrations(config, model, RenderingConfig(), CONTEXT_TOKENS))


def ends_in_seven(session: Session, turns: list[Turn]) -> bool:
    return len(turns) == 2 and "007" in session.session_id


def test_exactly_the_answers_are_trained_whoever_gave_them(tiny_model: Path) -> None:
    rendering = rendering_of(tiny_model)
    exact = demonstration(sample_of("a", exact_turns("a", 7, rendering)), rendering)
    text = demonstration(sample_of("a", text_turns("a", 7)), rendering)
    again = demonstration(sample_of("a", exact_turns("a", 7, rendering)), rendering, ids="rendered")
    assert (exact.source, text.source, again.source) == ("recorded", "rendered", "rendered")
    for each in (exact, text, again):
        (path,) = flatten(each.rollout.segments)
        assert path.ids.tolist() == flatten(exact.rollout.segments)[0].ids.tolist()
        pieces = np.flatnonzero(np.diff(path.mask, prepend=False, append=False)).reshape(-1, 2)
        said = [rendering.tokenizer.decode(path.ids[start:end]) for start, end in pieces]
        assert said == [
            '<think>\n\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 7, "b": 7}}\n'
            "</tool_call><|im_end|>",
            "<think>\n\n</think>\n\n14.<|im_end|>",
        ]


@pytest.mark.parametrize("kind", ["recorded", "rendered"])
def test_no_policy_gradient_is_computed_of_text_that_the_policy_did_not_sample(
    tiny_model: Path, kind: str
) -> None:
    rendering = rendering_of(tiny_model)
    turns = exact_turns("a", 7, rendering) if kind == "recorded" else text_turns("a", 7)
    each = demonstration(sample_of("a", turns), rendering)
    batch, algorithm = batch_of([each]), Algorithm(AlgorithmConfig(preset="sft"))
    assert batch.sources == (kind,)
    with pytest.raises(TrainingError, match=f"a: its tokens are {kind} text, which the policy"):
        algorithm.compute_advantages(batch)
    with pytest.raises(TrainingError, match=f"a: its tokens are {kind} text, which the policy"):
        algorithm.loss(batch)
    if kind == "rendered":
        with pytest.raises(ValueError, match="log-probability nan is not finite"):
            build_batch([Group("g", Task("g", {}), [each.rollout])])


def test_common_prefix_of_different_sessions_is_computed_once(tiny_model: Path) -> None:
    from trainer.rows.packing import pack

    rendering = rendering_of(tiny_model)
    each = [demonstration(sample_of(f"{n}", text_turns(f"{n}", n)), rendering) for n in range(4)]
    batch = batch_of(each)
    (micro,) = pack(batch, max_tokens=4096, share_prefixes=True)
    alone = [len(ids) for ids in batch.sequences]
    assert len(micro.targets) == batch.num_tokens == sum(one.trained for one in each)
    assert (
        len(micro.ids) < sum(alone) - 3 * 50
    )  # the system prompt and the tool: 50 tokens at least


def test_sessions_are_filtered_by_kind_reward_tag_and_predicate(
    tiny_model: Path, store: Path
) -> None:
    def names(**settings: object) -> list[str]:
        found = selected(tiny_model, store.parent, **settings).found
        return [each.rollout.trial_id[4:7] for each in found]

    assert len(names()) == 9
    assert names(min_reward=1) == ["001", "002", "004", "005", "007", "008"]
    assert names(kind="any", min_reward=1)[-1] == "009"
    assert names(kind="eval") == ["009"]
    assert names(tags={"task_id": "sum-004"}) == ["004"]
    assert names(where=f"{__name__}:ends_in_seven") == ["007"]
    assert names(reward="verifier", min_reward=1, tags={"task_id": "sum-001"}) == ["001"]


def test_every_place_gives_the_same_demonstrations(
    tiny_model: Path, store: Path, tmp_path: Path
) -> None:
    exported = tmp_path / "records"
    arguments = ["export", "--format", "records", "--store", f"sqlite:///{store}"]
    assert proxy_main([*arguments, "--out", str(exported)]) == 0
    places = [f"sqlite:///{store}", store, store.parent, exported]
    found = [selected(tiny_model, place, kind="any") for place in places]
    assert len({each.digest for each in found}) == 1
    assert selected(tiny_model, *places, kind="any").digest == found[0].digest
    assert found[0].describe().startswith("10 sessions (9 with recorded ids, 1 rendered), ")


def test_sft_without_reasoning_takes_the_two_ways_of_writing_an_answer(
    tiny_model: Path, store: Path
) -> None:
    for way in ("as_last", "as_history"):
        found = selected(tiny_model, store, ids="rendered", without_reasoning=way).found
        assert {each.source for each in found} == {"rendered"}
    with pytest.raises(ValueError, match="without_reasoning"):
        selected(tiny_model, store, without_reasoning="as_first")


def test_what_cannot_be_trained_on_is_counted_and_nothing_is_refused(
    tiny_model: Path, store: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"0 sessions .*check sft\.kind=train"):
        selected(tiny_model, store, min_reward=2)
    config = SftConfig(sessions=(str(store),))
    with pytest.raises(ConfigError, match="left out: 9 with more than the model's context of 100"):
        asyncio.run(read_demonstrations(config, tiny_model, RenderingConfig(), 100))
    with pytest.raises(ConfigError, match=r"has neither sessions\.db nor a"):
        selected(tiny_model, tmp_path)


def test_schedule_trains_each_demonstration_once_per_epoch_in_another_order(
    tiny_model: Path, store: Path
) -> None:
    found = selected(tiny_model, store).found
    schedule = Schedule(found, batch_sessions=4, epochs=2, seed=3)
    ids = [[each.rollout.trial_id for each in schedule.batch(n + 1)] for n in range(schedule.steps)]
    first, second = (list(chain.from_iterable(ids[at : at + 3])) for at in (0, 3))
    assert sorted(first) == sorted(second) == [each.rollout.trial_id for each in found]
    assert first != second
    assert [len(batch) for batch in ids] == [3] * 6
    assert ids[4] == [each.rollout.trial_id for each in schedule.batch(5)]


def test_held_out_tasks_are_not_trained(tiny_model: Path, store: Path) -> None:
    found = [*selected(tiny_model, store).found] * 2  # two sessions of each task
    train, held_out = split(found, 0.2, seed=0)
    assert len(held_out) == 4
    assert not {each.task_id for each in train} & {each.task_id for each in held_out}
    assert split(found, 0.0, seed=0) == (found, [])
    with pytest.raises(ConfigError, match="all sessions are of one task"):
        split(found[:1], 0.2, seed=0)
