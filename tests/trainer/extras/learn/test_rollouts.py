"""Which tokens of a judged session are trained."""

from __future__ import annotations

import random
import secrets as random_secrets
import string
from typing import Any

import numpy as np
import pytest

from tests.trainer.extras.learn.days import Conversation, session
from trainer.extras.learn.evidence import Corrections, Rating
from trainer.extras.learn.judging import Judged, judged
from trainer.extras.learn.rollouts import Lineage, prepared
from trainer.extras.learn.seen import Seen

LINEAGE = Lineage("work", {5: 0, 3: 1, 0: 2}, max_staleness=1, temperature=1.0)


def all_good(talk: Conversation) -> Judged:
    return Judged(talk.name, 1.0, {turn.index: 1.0 for turn in talk.turns})


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({}, None),
        ({"sampling": {"policy": "work-3"}}, None),
        ({"sampling": {"policy": "work-0"}}, "sampled by an adapter that is too old"),
        ({"sampling": {"policy": ""}}, "sampled by an adapter that is too old"),
        ({"sampling": {"policy": "work-9"}}, "sampled by an adapter that is not known"),
        ({"sampling": {"policy": "other-5"}}, "sampled by another policy"),
        ({"sampling": {"temperature": 0.7}}, "sampled at another temperature"),
    ],
)
def test_a_turn_is_context_unless_this_policy_sampled_it_lately(
    more: dict[str, Any], why: str | None
) -> None:
    talk = Conversation("s", adapter=5).user("x").answer("a").answer("b", **more)
    found = prepared(session("s"), talk.turns, all_good(talk), LINEAGE)
    assert found.group is not None
    (rollout,) = found.group.rollouts
    assert rollout.sampled_tokens == (2 if why else 4)
    assert dict(found.left_out) == ({why: 1} if why else {})
    assert set(rollout.turn_returns) == ({0} if why else {0, 1})


def test_versions_are_the_numbers_of_adapters_whatever_the_engine_says() -> None:
    talk = Conversation("s", adapter=5).user("x").answer("a", version=77)
    group = prepared(session("s"), talk.turns, all_good(talk), LINEAGE).group
    assert group is not None
    (rollout,) = group.rollouts
    assert {int(v) for seg in rollout.segments for v in seg.versions[seg.mask]} == {5}


def test_a_session_without_a_value_is_no_group() -> None:
    talk = Conversation("s", adapter=5).user("x").answer("a")
    assert prepared(session("s"), talk.turns, Judged("s", 0.0), LINEAGE).group is None


def secret(rng: random.Random) -> str:
    """A key, a token, a password or an address, by no code of the detector."""
    letters = string.ascii_letters + string.digits

    def some(count: int) -> str:
        return "7" + "".join(rng.choice(letters) for _ in range(count - 1))

    kinds = (
        lambda: "ghp_" + some(36),
        lambda: "AKIA" + "".join(rng.choice(string.ascii_uppercase + "234567") for _ in range(16)),
        lambda: "xoxb-" + "".join(rng.choice(string.digits) for _ in range(12)) + "-" + some(24),
        lambda: f"{rng.choice('abcdef')}{some(6).lower()}@{some(8).lower()}.com",
        lambda: "sk-" + some(48),
        lambda: "glpat-" + some(20),
    )
    return rng.choice(kinds)()


@pytest.mark.parametrize("seed", range(40))
def test_no_token_of_a_planted_secret_is_trained(seed: int) -> None:
    """The tokens are characters, of a vocabulary of Unicode."""
    rng = random.Random(seed)
    planted = secret(rng)
    texts = [f"I wrote the key {planted} into the file.", "Done.", f"It is {planted}, as you said."]

    def decode(ids: list[int]) -> str:
        return "".join(map(chr, ids))

    talk = Conversation("s", adapter=5).user("Set it up.")
    for text in texts:
        talk.answer(text, ids=[ord(each) for each in text])
    found = prepared(session("s"), talk.turns, all_good(talk), LINEAGE, decode)
    assert found.group is not None
    trained = "".join(
        decode(part.ids[part.mask].tolist()) for part in found.group.rollouts[0].segments
    )
    assert planted not in trained
    assert not any(planted[at : at + 8] in trained for at in range(len(planted) - 8))
    assert "into the file.Done.It is " in trained.replace("\x01\x02\x03", "")
    assert found.left_out["tokens of a secret"] == 2 * len(planted)


def test_no_token_of_a_secret_that_only_the_metadata_shows_is_trained() -> None:
    def decode(ids: list[int]) -> str:
        return "".join(map(chr, ids))

    text = "The word is plum-Tree_77, as you know."
    talk = Conversation("s", adapter=5).user("Hello.").answer(text, ids=[ord(c) for c in text])
    told = session("s", metadata={"db_password": "plum-Tree_77"})
    found = prepared(told, talk.turns, all_good(talk), LINEAGE, decode)
    assert found.group is not None
    (segment,) = found.group.rollouts[0].segments
    assert decode(segment.ids[segment.mask].tolist()) == "The word is , as you know."
    assert prepared(session("s"), talk.turns, all_good(talk), LINEAGE, decode).left_out == {}
    talk.user("No, I said plum-Tree_77 is my key").answer()
    decision = judged(Seen(told, talk.turns, 0.0), (Rating(), Corrections()))
    assert decision.findings
    assert "plum" not in repr(decision)


def test_a_decision_quotes_no_secret() -> None:
    token = "ghp_" + random_secrets.token_hex(18)
    talk = Conversation("s").user("Hello.").answer("Yes.").user(f"No, {token} is my key").answer()
    found = judged(Seen(session("s", rating=1.0), talk.turns, 0.0), (Rating(), Corrections()))
    assert len(found.findings) == 2
    assert token[:12] not in repr(found)
    assert np.isfinite(found.value)
