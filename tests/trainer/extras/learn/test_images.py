"""A learner whose model reads images learns from sessions with images, on the engine's pixels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from pydantic import ValidationError
from transformers import AutoModelForImageTextToText

from tests.trainer.extras.learn.days import Conversation, Days, config, learner_of, session
from tests.trainer.policy.test_image_trees import (
    PICTURES,
    StandIn,
    Written,
    own_code,
    picture,
    settings_of,
)
from trainer.batch import build_batch
from trainer.errors import ConfigError
from trainer.extras.learn.learner import DailyLearner
from trainer.extras.learn.rebuild import forget
from trainer.extras.learn.rollouts import scored
from trainer.policy.proof_on_copy import randomize

GOOD, BAD = (7, 8), (9, 10)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.extras.images.qwen.Processor", StandIn)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3_vl")
    torch.manual_seed(0)
    model: Any = AutoModelForImageTextToText.from_config(settings_of("qwen3_vl"))
    with torch.no_grad():
        randomize(model)
    model.save_pretrained(path)
    return path


def look(days: Days, model: Path, name: str, data: bytes, good: bool, **more: Any) -> None:
    """A session of one answer about an image, with the log-probabilities of the base."""
    seen = Written().text(4).image(data).text(3)
    talk = Conversation(name, more.pop("adapter", 0)).user("Which?")
    talk.answer("That.", ids=GOOD if good else BAD)
    ids, images = np.array(seen.ids, np.int32), tuple(seen.images)
    turn = replace(talk.turns[0], prompt_ids=ids, images=images)
    found = session(name, rating=float(good), **more)
    group = scored(found, [turn], "work", 1.0, reads_images=True)
    assert group is not None
    batch = build_batch([group])
    batch.pictures = seen.data
    logprobs, _ = own_code(model, batch, torch.ones(batch.num_tokens))
    days.record_of[name] = found, [replace(turn, logprobs=logprobs.float().numpy())]
    days.images |= seen.data


def week(days: Days, model: Path, pictures: Sequence[bytes]) -> None:
    for number, data in enumerate(pictures):
        look(days, model, f"look-{number}", data, number % 2 == 0)


def vision(model: Path, how: str = "frozen") -> dict[str, Any]:
    return {"model": {"path": model, "vision": how, "lora": {"rank": 2, "alpha": 4}}}


def _gate(learner: DailyLearner) -> Any:
    return next(line for line in learner.journal.lines if line["kind"] == "gate")


async def test_sessions_with_images_are_learned_compared_and_forgotten(
    seeing: Path, tmp_path: Path
) -> None:
    days = Days()
    week(days, seeing, [*PICTURES, picture(4, 4, 9)])
    more = {**vision(seeing), "gates": {"max_mismatch": 1e-4, "max_kl": 100.0}}
    async with learner_of(seeing, tmp_path / "l", days, **more) as (learner, _):
        await learner.tick()
        assert sorted(learner.history.updates[1]["sessions"]) == [f"look-{n}" for n in range(4)]
        assert not learner.history.updates[1]["left_out"]
        assert _gate(learner)["measures"]["mismatch"] < 1e-5
        assert learner.history.canary == 1
        batch = (tmp_path / "l" / "batches" / "000001").read_bytes()
        assert all(batch.count(data) == 1 for data in PICTURES)

        look(days, seeing, "later", PICTURES[1], good=True, at=days.state["since"] + 1)
        await learner.tick()
        assert learner.history.sessions["later"]["log_ratio"] > 0

        del days.record_of["look-1"]
        await forget(learner, {"look-1"})
        files = [each for each in (tmp_path / "l").rglob("*") if each.is_file()]
        assert not any(PICTURES[1] in each.read_bytes() for each in files)


async def test_session_with_other_bytes_than_the_engine_had_is_not_learned(
    seeing: Path, tmp_path: Path
) -> None:
    days = Days()
    week(days, seeing, [*PICTURES, picture(4, 4, 9)])
    first, second, *_ = days.images
    days.images[first] = days.images[second]
    async with learner_of(seeing, tmp_path / "l", days, **vision(seeing)) as (learner, engine):
        await learner.tick()
        assert f"image {first[:12]}: its bytes are those of another image" in str(
            learner.history.updates[1]["failed"]
        )
        assert learner.history.canary is None
        assert not engine.adapters


async def test_comparison_without_the_images_is_by_outcomes_alone(
    seeing: Path, tmp_path: Path
) -> None:
    days = Days()
    week(days, seeing, [*PICTURES, picture(4, 4, 9)])
    async with learner_of(seeing, tmp_path / "l", days, **vision(seeing)) as (learner, _):
        await learner.tick()
        look(days, seeing, "later", PICTURES[1], good=True, at=days.state["since"] + 1)
        days.images = dict.fromkeys(days.images, b"8 8 8")
        await learner.tick()
        assert learner.history.sessions["later"]["log_ratio"] is None
        assert learner.history.comparison.counts["stable"] == [1, 1]


def test_tower_is_not_trained_because_adapters_do_not_have_it(seeing: Path, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, ValidationError), match="set vision=frozen"):
        config(seeing, tmp_path, "http://127.0.0.1:1", **vision(seeing, "trained"))
