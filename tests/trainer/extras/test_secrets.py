"""200 secrets in ten sessions of a real proxy: none in a token that is trained of their records, by
`agentic-train sft` or the daily learner. What trains something else from records does not exist."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from agent_loop.records import Segment
from agent_loop.trajectory import flatten
from proxy.cli import main as proxy_main
from proxy.config import RenderingConfig
from proxy.records import Session, Turn
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import load_tokenizer
from tests.proxy.checkpoint import write_checkpoint
from tests.proxy.conftest import starting_proxies
from tests.proxy.extras.secrets.planted import Planted
from tests.proxy.extras.secrets.planted_sessions import (
    PASSWORD,
    SECRETS,
    SESSIONS,
    branched,
    recorded,
    seen,
    spelled,
)
from trainer.extras.learn.judging import Judged
from trainer.extras.learn.rollouts import Lineage, prepared
from trainer.extras.sft.config import SftConfig
from trainer.extras.sft.demonstrations import read_demonstrations

CONTEXT_TOKENS = 1_000_000
Sessions = Mapping[str, list[Planted]]


def trained_text(segments: tuple[Segment, ...], rendering: Rendering) -> list[str]:
    """The trained tokens as text, each run of them by itself."""
    texts = []
    for path in flatten(segments):
        edges = np.flatnonzero(np.diff(path.mask, prepend=False, append=False)).reshape(-1, 2)
        texts += [rendering.tokenizer.decode(path.ids[start:end].tolist()) for start, end in edges]
    return texts


def trained_of_secrets(
    segments: tuple[Segment, ...], rendering: Rendering, secrets: list[Planted]
) -> int:
    """Number of trained tokens with a character of a planted secret."""
    return sum(
        int((spelled(path.ids.tolist(), rendering.tokenizer.decode, secrets) & path.mask).sum())
        for path in flatten(segments)
    )


async def test_no_trained_token_spells_a_planted_secret(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "checkpoint")
    rendering = Rendering(load_tokenizer(model), RenderingConfig())
    async with starting_proxies(model, rendering, tmp_path) as start:
        proxy = await start()
        sessions = {session.trial_id: secrets for session, secrets in await recorded(proxy)}
        assert sum(map(len, sessions.values())) == SECRETS
        store = f"sqlite:///{tmp_path}/proxy.db"
        export = ["export", "--store", store, "--format", "records", "--model", str(model)]
        out = str(tmp_path / "records")
        assert await asyncio.to_thread(proxy_main, [*export, "--out", out]) == 0
        records = [await proxy.control.get_turns(name) for name in sessions]
    for place, ids in ((store, "auto"), (store, "rendered"), (out, "auto")):
        await sft_trains_none(place, ids, model, rendering, sessions)
    for session, turns in records:
        learner_trains_none(session, turns, rendering, sessions[session.session_id])


async def test_no_trained_token_of_a_branch_spells_what_its_origin_shows(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "checkpoint")
    rendering = Rendering(load_tokenizer(model), RenderingConfig())
    async with starting_proxies(model, rendering, tmp_path) as start:
        await branched(await start())
    config = SftConfig.model_validate({"sessions": [f"sqlite:///{tmp_path}/proxy.db"]})
    found = await read_demonstrations(config, model, RenderingConfig(), CONTEXT_TOKENS)
    assert len(found.found) == 3, found.describe()
    for each in found.found:
        texts = trained_text(each.rollout.segments, rendering)
        assert "I take" in "".join(texts)
        assert not [text for text in texts if PASSWORD in text], each.rollout.trial_id


async def sft_trains_none(
    place: str, ids: str, model: Path, rendering: Rendering, sessions: Sessions
) -> None:
    config = SftConfig.model_validate({"sessions": [place], "ids": ids})
    found = await read_demonstrations(config, model, RenderingConfig(), CONTEXT_TOKENS)
    assert len(found.found) == SESSIONS, found.describe()
    assert "tokens that spell secrets are not trained" in found.describe()
    for each in found.found:
        segments, secrets = each.rollout.segments, sessions[each.rollout.trial_id]
        assert trained_of_secrets(segments, rendering, secrets) == 0, place
        texts = trained_text(segments, rendering)
        assert seen(texts, secrets) == []
        assert not any("[secret:" in text for text in texts), place
        assert any("I wrote it down." in text for text in texts)
        assert each.trained == sum(int(part.mask.sum()) for part in segments) > 100
        assert each.secret > 100


def learner_trains_none(
    session: Session, turns: list[Turn], rendering: Rendering, secrets: list[Planted]
) -> None:
    lineage = Lineage("work", {0: 0}, max_staleness=1, temperature=1.0)
    judged = Judged(session.session_id, 1.0, {turn.index: 1.0 for turn in turns})
    found = prepared(session, turns, judged, lineage, rendering.tokenizer.decode)
    assert found.group is not None
    (rollout,) = found.group.rollouts
    assert trained_of_secrets(rollout.segments, rendering, secrets) == 0
    assert seen(trained_text(rollout.segments, rendering), secrets) == []
    assert found.left_out["tokens of a secret"] > 100
    assert rollout.sampled_tokens > 100
