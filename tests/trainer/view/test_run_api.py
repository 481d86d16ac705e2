"""What the page's server sends of a run that the trainer wrote."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from proxy.errors import StoreError
from proxy.extras.rules.rules import save_rule
from proxy.extras.view.run_folder import reading
from proxy.extras.view.run_requests import RunRequests
from proxy.extras.view.runs import RecordedRuns
from proxy.records import Mark, RuleAction
from proxy.run_files.files import read_jsonl
from proxy.store import open_store
from proxy.store.protocol import Store
from tests.proxy.conftest import RunningProxy, StartProxy
from tests.proxy.extras.view.test_api import Reader
from tests.proxy.store.test_conformance import a_session
from tests.trainer.view.recorded_run import DIFFERENCE, begin, training, whole
from tests.trainer.view.test_run_openapi import handler_of


async def test_tokens_have_the_advantages_and_probabilities_of_the_trainer(
    start_proxy: StartProxy, checkpoint: Path, tmp_path: Path
) -> None:
    proxy, run = await training(start_proxy, begin(tmp_path / "run", checkpoint))
    await run.step()
    run.log.close()
    batch = run.batch
    assert batch is not None
    assert batch.advantages is not None
    reader = Reader(proxy.http, proxy.url)
    seen = 0
    for index, trial in enumerate(batch.trial_ids):
        page = await reader.get("tokens", session=trial, turn=1, start=0, count=4000)
        trained = page["trained"]
        assert trained["step"] == 1
        own = (batch.rollout == index).numpy()
        order = np.argsort(batch.position[own].numpy())
        positions = batch.position[own].numpy()[order]
        shown = [at for at, each in enumerate(trained["advantages"]) if each is not None]
        assert shown == positions.tolist()
        expected = batch.advantages[own].numpy()[order]
        assert [trained["advantages"][at] for at in shown] == pytest.approx(expected, abs=1e-5)
        difference = [trained["logprobs"][at] - page["logprobs"][at] for at in shown]
        entropies = [trained["entropies"][at] / page["logprobs"][at] for at in shown]
        assert entropies == pytest.approx([-2.0] * len(shown), abs=1e-2)
        assert difference == pytest.approx([DIFFERENCE] * len(shown), abs=1e-4)
        assert {trained["trained"][at] for at in shown} == {index > 0}
        seen += len(shown)
    assert seen == batch.num_tokens


async def test_tokens_of_a_session_that_was_not_trained_have_no_such_columns(
    start_proxy: StartProxy, checkpoint: Path, tmp_path: Path
) -> None:
    proxy, run = await training(start_proxy, begin(tmp_path / "run", checkpoint))
    await run.evaluate("before")
    page = await Reader(proxy.http, proxy.url).get("tokens", session="lamps-1", turn=0)
    assert "trained" not in page
    run.log.close()


async def test_no_tokens_are_kept_if_they_may_have_no_bytes(
    start_proxy: StartProxy, checkpoint: Path, tmp_path: Path
) -> None:
    folder = begin(tmp_path / "run", checkpoint)
    proxy, run = await training(start_proxy, folder, token_bytes=0)
    await run.step()
    run.log.close()
    assert not run.log.keeps_tokens
    assert not folder.tokens.exists()
    page = await Reader(proxy.http, proxy.url).get("tokens", session="lamps-1", turn=0)
    assert "trained" not in page


async def test_metrics_are_read_on_from_where_the_reader_was(
    start_proxy: StartProxy, checkpoint: Path, tmp_path: Path
) -> None:
    proxy, run = await training(start_proxy, begin(tmp_path / "run", checkpoint))
    reader = Reader(proxy.http, proxy.url)
    await run.step()
    first = await reader.get("run/metrics", run="run")
    await run.step()
    second = await reader.get("run/metrics", run="run", **{"from": first["next"]})
    assert [line["step"] for line in first["steps"]] == [1]
    assert [line["step"] for line in second["steps"]] == [2]
    assert second["steps"] == list(read_jsonl(run.folder.metrics))[1:]
    state = await reader.get("state")
    assert state["runs"][0]["metrics"][:2] == [second["file"], second["next"]]
    run.log.close()


@pytest.fixture
async def recorded(
    start_proxy: StartProxy, checkpoint: Path, tmp_path: Path
) -> tuple[RunningProxy, Reader]:
    proxy, run = await training(start_proxy, begin(tmp_path / "run", checkpoint))
    await whole(run)
    return proxy, Reader(proxy.http, proxy.url)


async def test_trials_are_filtered_and_read_page_by_page(
    recorded: tuple[RunningProxy, Reader], tmp_path: Path
) -> None:
    _, reader = recorded
    pages = []
    before = None
    while True:
        query = {"run": "run", "limit": 7} | ({"before": before} if before else {})
        page = await reader.get("run/trials", **query)
        pages.append([trial["trial_id"] for trial in page["trials"]])
        before = page["next"]
        if before is None:
            break
    names = [name for page in pages for name in page]
    assert len(names) == len(set(names)) == 2 * 2 + 3 * 2 * 4
    assert names[0] == "lamps-22"
    rewards = [trial["reward"] for trial in read_jsonl(tmp_path / "run/trials.jsonl")]
    assert 0 < rewards.count(0.0) < rewards.count(1.0)
    filters: tuple[tuple[dict[str, str], int], ...] = (
        ({"kind": "eval"}, 4),
        ({"status": "failed"}, 6),
        ({"errors": "yes"}, 6),
        ({"text": "LONGER THAN"}, 6),
        ({"min_reward": "1"}, rewards.count(1.0)),
        ({"max_reward": "0"}, rewards.count(0.0)),
        ({"task": "chairs", "kind": "train"}, 12),
        ({"source": "other"}, 0),
        ({"min_tokens": "100000"}, 0),
    )
    for asked, count in filters:
        found = await reader.get("run/trials", run="run", limit=200, **asked)
        assert len(found["trials"]) == count, asked


async def test_trials_are_filtered_by_the_rule_that_marked_them(
    start_proxy: StartProxy, checkpoint: Path, tmp_path: Path
) -> None:
    proxy, run = await training(start_proxy, begin(tmp_path / "run", checkpoint))
    query = {"text": "= 11", "answers_only": True}
    async with reading(run.folder.sessions) as browser:
        await save_rule(browser, {"name": "adds", "query": query})
    await whole(run)
    reader = Reader(proxy.http, proxy.url)
    everything = (await reader.get("run/trials", run="run", limit=200))["trials"]
    marked = [each["trial_id"] for each in everything if each["marks"]]
    assert 3 < len(marked) < len(everything) - 3
    for rule, expected in (("adds", marked), ("*", marked), ("other", [])):
        found, before = list[str](), dict[str, Any]()
        while True:
            page = await reader.get("run/trials", run="run", marked=rule, limit=3, **before)
            assert len(page["trials"]) <= 3
            found += [each["trial_id"] for each in page["trials"]]
            if page["next"] is None:
                break
            before = {"before": page["next"]}
        assert found == expected
    evaluated = await reader.get("run/trials", run="run", marked="adds", kind="eval")
    assert {each["kind"] for each in evaluated["trials"]} <= {"eval"}


async def test_trials_of_another_run_have_the_marks_of_its_own_sessions(
    start_proxy: StartProxy, checkpoint: Path, tmp_path: Path
) -> None:
    for name in ("first", "second"):
        _, run = await training(start_proxy, begin(tmp_path / name, checkpoint))
        await run.evaluate("before")
        run.log.close()
        mark = Mark(name, RuleAction.MARK, 0, 1.0, "")
        async with reading(run.folder.sessions) as browser:
            await browser.add_mark("lamps-1", mark)
    runs = RecordedRuns([tmp_path / "second", tmp_path / "first"])
    async with reading(run.folder.sessions) as second:
        requests = RunRequests(lambda: second, runs)
        for name in ("first", "second"):
            request = make_mocked_request("GET", f"/view/run/trials?run={name}&marked=*")
            answered = await handler_of(requests, "/view/run/trials")(request)
            assert isinstance(answered, web.Response)
            assert isinstance(answered.body, bytes)
            trials = orjson.loads(answered.body)["trials"]
            assert [each["trial_id"] for each in trials] == ["lamps-1"]
            assert [mark["rule"] for mark in trials[0]["marks"]] == [name]


async def test_store_of_another_run_is_only_read(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        async with written_store(tmp_path / name / "sessions.db") as store:
            await store.create_session(a_session("lamps-1"))
            await store.browser.add_mark("lamps-1", Mark(name, RuleAction.MARK, 0, 1.0, ""))
        line = {"step": 0, "trial_id": "lamps-1", "kind": "train"}
        (tmp_path / name / "trials.jsonl").write_bytes(orjson.dumps(line) + b"\n")
    file = tmp_path / "second" / "sessions.db"

    def in_file(sql: str) -> list[tuple[int]]:
        with closing(sqlite3.connect(file)) as connection:
            found = connection.execute(sql).fetchall()
            connection.commit()
            return found

    async def marks_of_trials(query: str = "") -> list[str]:
        request = make_mocked_request("GET", f"/view/run/trials?run=second{query}")
        answered = await handler_of(requests, "/view/run/trials")(request)
        assert isinstance(answered, web.Response)
        assert isinstance(answered.body, bytes)
        (trial,) = orjson.loads(answered.body)["trials"]
        return [mark["rule"] for mark in trial["marks"]]

    owners = in_file("SELECT count(*) FROM owners")
    runs = RecordedRuns([tmp_path / "first", tmp_path / "second"])
    async with written_store(tmp_path / "first" / "sessions.db") as first:
        requests = RunRequests(lambda: first.browser, runs)
        assert await marks_of_trials() == ["second"]
        assert in_file("SELECT count(*) FROM owners") == owners
        in_file("PRAGMA user_version = 99")
        assert await marks_of_trials("&marked=second") == ["second"]
        async with runs.browser_of(runs["second"], first.browser) as browser:
            assert browser is not None
            with pytest.raises(StoreError, match="open for reading only"):
                await browser.add_mark("lamps-1", Mark("x", RuleAction.MARK, 0, 1.0, ""))
        in_file("DROP TABLE marks")
        assert await marks_of_trials() == []
        with pytest.raises(StoreError, match="no such table"):
            await marks_of_trials("&marked=second")


@asynccontextmanager
async def written_store(file: Path) -> AsyncIterator[Store]:
    store = await open_store(f"sqlite:///{file}")
    try:
        yield store
    finally:
        await store.close()


async def test_step_has_its_groups_and_the_evaluations_after_it(
    recorded: tuple[RunningProxy, Reader],
) -> None:
    _, reader = recorded
    trials = (await reader.get("run/step", run="run", step=3))["trials"]
    assert [trial["group"] for trial in trials[:8]] == ["g2-0"] * 4 + ["g2-1"] * 4
    assert [trial["evaluation"] for trial in trials[8:]] == ["after"] * 2
    assert (await reader.get("run/step", run="run", step=9))["trials"] == []


async def test_summary_has_status_evaluations_and_configuration(
    recorded: tuple[RunningProxy, Reader],
) -> None:
    _, reader = recorded
    found = await reader.get("run", run="run")
    assert found["status"] == "done"
    assert found["config"]["optimizer.lr"] == "0.0001"
    before, after = found["evaluations"]
    assert (before["name"], before["step"], after["name"], after["step"]) == (
        "before",
        0,
        "after",
        3,
    )
    scores = {each["name"]: each for each in after["sources"]}
    assert scores.keys() == {"shop", "street"}
    for each in scores.values():
        assert each["trials"] == 1
        assert each["interval"][0] <= each["success"] <= each["interval"][1]
        assert each["reward"] == each["success"]
    low, high = after["interval"]
    assert low <= after["success"] <= high
    lowest, highest = after["reward_interval"]
    assert lowest <= after["reward"] <= highest
    assert (await reader.ask("run", run="other"))[0] == 404
