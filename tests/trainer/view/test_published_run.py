"""A trainer that is not ours, which knows `/openapi.json` and plain HTTP, publishes a run."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from pydantic import TypeAdapter

from proxy.extras.view import published_run
from proxy.extras.view.access import new_key
from proxy.extras.view.published_run import PublishedRuns
from proxy.extras.view.run_folder import reading
from proxy.run_files.files import read_jsonl
from proxy.run_files.lines import PhaseFields, TrialFields
from tests.needs import needs
from tests.proxy.conftest import ADMIN_KEY, RunningProxy, StartProxy
from tests.proxy.extras.view.chromium import MISSING, Tab
from tests.proxy.extras.view.conftest import enter, show
from tests.proxy.extras.view.documented import DOCUMENT, check
from tests.proxy.extras.view.recording import call, user
from tests.proxy.extras.view.test_api import Reader
from tests.trainer.view.recorded_run import begin, training, whole
from tests.trainer.view.screenshots import views

KEY = {"Authorization": f"Bearer {ADMIN_KEY}"}
EVALUATION = {"success": 0.5, "interval": [0.1, 0.9], "reward": 0.5, "tasks": 1, "trials": 1}


class ForeignTrainer:
    """Sends JSON; checks what it sends and gets against `/openapi.json`."""

    def __init__(self, proxy: RunningProxy, name: str = "foreign") -> None:
        self.http = proxy.http
        self.url = proxy.url
        self.name = name

    async def send(self, what: str, body: Any = None, *, method: str = "PUT", **query: int) -> Any:
        status, answered = await self.try_to(what, body, method=method, **query)
        assert status == 200, answered
        return answered

    async def try_to(
        self, what: str, body: Any = None, *, method: str = "PUT", **query: int
    ) -> tuple[int, Any]:
        path = "/view/runs/{name}" + (what and f"/{what}")
        described = DOCUMENT["paths"][path][method.lower()]
        url = self.url + path.format(name=self.name)
        async with self.http.request(method, url, json=body, headers=KEY, params=query) as response:
            answered = orjson.loads(await response.read())
        if response.status == 200 and body is not None:
            check(body, described["requestBody"]["content"]["application/json"]["schema"])
        content = described["responses"][str(response.status)]["content"]
        check(answered, content["application/json"]["schema"])
        return response.status, answered

    async def append(self, what: str, lines: list[dict[str, Any]], **query: int) -> int:
        return int((await self.send(what, {what: lines}, method="POST", **query))["next"])


def a_trial(step: int, trial: str, reward: float, **more: Any) -> dict[str, Any]:
    counts = {"turns": 1, "sampled_tokens": 5, "seconds": 2.5, "started_at": time.time()}
    line = {"step": step, "kind": "train", "trial_id": trial, "task_id": "lamps"}
    return line | counts | {"status": "done", "reward": reward} | more


async def publish(proxy: RunningProxy) -> ForeignTrainer:
    """A whole run of one step with two rollouts, between two evaluations."""
    prompts = {}
    for name in ("before-1", "first", "second", "after-1"):
        session = await proxy.session(trial_id=name)
        proxy.answers(f"The answer of {name} is 28.")
        await call(proxy, session, [user("What do four lamps at seven each cost?")])
        _, (turn,) = await proxy.control.get_turns(name)
        prompts[name] = (turn.prompt_tokens, len(turn.sampled_ids))
    trainer = ForeignTrainer(proxy)
    await trainer.send("", {"config": {"optimizer": {"lr": 1e-5}, "judge": {"api_key": "k-1"}}})
    await trainer.send("summary", {"status": "running"})
    now = {"step": 1, "phase": "sampling", "started_at": time.time(), "trials": 2, "ended": 1}
    await trainer.send("now", now | {"failed": 0, "groups": None, "errors": []})
    held_out = {"kind": "eval", "evaluation": "before"}
    await trainer.append("trials", [a_trial(0, "before-1", 0.0, **held_out)])
    rollouts = [a_trial(1, "first", 1.0, group="g"), a_trial(1, "second", 0.0, group="g")]
    await trainer.append("trials", rollouts)
    held_out["evaluation"] = "after"
    await trainer.append("trials", [a_trial(1, "after-1", 1.0, **held_out)])
    metrics = {"reward/mean": 0.5, "actor/entropy": 1.25, "mine/loss": None}
    await trainer.append("steps", [{"step": 1, "metrics": metrics}])
    phase = {"step": 1, "phase": "training", "started_at": time.time(), "seconds": 1.5}
    await trainer.append("phases", [phase])
    spans = [prompts[name] for name in ("first", "second")]
    positions = [at for start, count in spans for at in range(start, start + count)]
    counts = [count for _, count in spans]
    await trainer.send(
        "tokens",
        {
            "step": 1,
            "trials": ["first", "second"],
            "starts": [0, counts[0], sum(counts)],
            "turns": [0] * len(positions),
            "positions": positions,
            "advantages": [0.5] * counts[0] + [-0.5] * counts[1],
            "logprobs": [-1.5] * len(positions),
            "entropies": [None, *[0.75] * (len(positions) - 1)],
            "trained": [True] * len(positions),
        },
    )
    return trainer


async def end(trainer: ForeignTrainer) -> None:
    evaluations = {"before": EVALUATION | {"step": 0}, "after": EVALUATION | {"step": 1}}
    await trainer.send("summary", {"status": "done", "steps": 1, "eval": evaluations})


@pytest.fixture
async def publishing(start_proxy: StartProxy, tmp_path: Path) -> RunningProxy:
    return await start_proxy(published_runs=tmp_path / "published")


async def test_published_run_is_answered_like_one_of_our_own(publishing: RunningProxy) -> None:
    trainer = await publish(publishing)
    reader = Reader(publishing.http, publishing.url)
    (state,) = (await reader.get("state"))["runs"]
    assert (state["name"], state["now"]["phase"]) == ("foreign", "sampling")
    assert (await reader.get("run", run="foreign"))["status"] == "running"
    await end(trainer)
    run = await reader.get("run", run="foreign")
    assert (run["status"], run["config"]["optimizer.lr"]) == ("done", "1e-05")
    assert "k-1" not in str(run)
    assert [each["interval"] for each in run["evaluations"]] == [[0.1, 0.9]] * 2
    (line,) = (await reader.get("run/metrics", run="foreign"))["steps"]
    assert (line["actor/entropy"], line["mine/loss"]) == (1.25, None)
    trials = (await reader.get("run/trials", run="foreign"))["trials"]
    assert [each["trial_id"] for each in trials] == ["after-1", "second", "first", "before-1"]
    step = (await reader.get("run/step", run="foreign", step=1))["trials"]
    assert [each["group"] for each in step] == ["g", "g", None]
    page = await reader.get("tokens", session="second", turn=0)
    sampled = [each is not None for each in page["logprobs"]]
    trained = page["trained"]
    assert [each == -0.5 for each in trained["advantages"]] == sampled
    assert {each for each in trained["entropies"] if each is not None} == {0.75}
    trace = (await reader.get("run/trace", run="foreign"))["traceEvents"]
    assert "training" in {each["name"] for each in trace}
    assert "trial first" in {
        each["args"]["name"] for each in trace if each["name"] == "process_name"
    }
    assert (await reader.get("state"))["runs"][0]["now"] is None
    await trainer.send("", method="DELETE")
    assert (await reader.get("state"))["runs"] == []
    assert (await reader.ask("run", run="foreign"))[0] == 404


@pytest.mark.programs
@needs(MISSING)
async def test_published_run_is_shown_in_every_view(publishing: RunningProxy, tab: Tab) -> None:
    trainer = await publish(publishing)
    await enter(tab, publishing)
    await show(tab, "/now", "document.querySelector('.training')")
    assert "sampling" in await tab.text(".training")
    await end(trainer)
    for place, ready in views("foreign", 1, "g", "first", turn=0).values():
        await show(tab, place, ready)
    await show(tab, "/tokens/second?turn=0&as=table", "document.querySelector('.token-table .p')")
    assert "0.75 nats" in await tab.text(".details")
    await show(tab, "/trial/first", "document.querySelector('.message.sampled')")
    assert "The answer of first" in await tab.text(".conversation")
    await show(tab, "/search?text=of+second", "document.querySelector('main a.id')")
    assert tab.complaints == []


async def begun(proxy: RunningProxy) -> ForeignTrainer:
    trainer = ForeignTrainer(proxy)
    await trainer.send("", {"config": {}})
    return trainer


TOKENS = {"step": 1, "trials": ["a", "b"], "starts": [0, 2, 3]}
TOKENS |= {"turns": [0, 0, 0], "positions": [4, 5, 4], "advantages": [0.5, 0.5, None]}


@pytest.mark.parametrize(
    ("what", "method", "body", "reason"),
    [
        ("tokens", "PUT", TOKENS | {"starts": [0, 2]}, "one entry more than trials"),
        ("tokens", "PUT", TOKENS | {"starts": [0, 2, 9]}, "number of tokens"),
        ("tokens", "PUT", TOKENS | {"starts": [0, 3, 2, 3]}, "starts"),
        ("tokens", "PUT", TOKENS | {"starts": [], "trials": []}, "starts"),
        ("tokens", "PUT", TOKENS | {"trials": ["a", "a"]}, "twice"),
        ("tokens", "PUT", TOKENS | {"positions": [5, 4, 4]}, "in the order"),
        ("tokens", "PUT", TOKENS | {"positions": [4, 4, 4]}, "in the order"),
        ("tokens", "PUT", TOKENS | {"advantages": [0.5]}, "same length"),
        ("tokens", "PUT", TOKENS | {"advantages": [1e300, 0, 0]}, "advantages.0"),
        ("tokens", "PUT", TOKENS | {"positions": [-1, 4, 4]}, "positions.0"),
        ("steps", "POST", {"steps": [{"step": 1, "metrics": {"x": "y"}}]}, "steps.0.metrics.x"),
        ("steps", "POST", {"steps": [{"metrics": {}}]}, "steps.0.step"),
        ("steps", "POST", {}, "steps"),
        ("trials", "POST", {"trials": [a_trial(1, "a", 1.0, kind="x")]}, "trials.0.kind"),
        ("trials", "POST", {"trials": [a_trial(2, "a", 1.0), a_trial(1, "b", 0.0)]}, "decrease"),
        ("summary", "PUT", {"status": "fine"}, "status"),
        ("now", "PUT", {"step": 1}, "phase"),
        ("", "PUT", {"config": []}, "config"),
    ],
)
async def test_what_does_not_fit_is_refused_with_its_place(
    publishing: RunningProxy, what: str, method: str, body: Any, reason: str
) -> None:
    trainer = await begun(publishing)
    status, answered = await trainer.try_to(what, body, method=method)
    assert status == 400
    assert reason in answered["error"]["message"]


async def test_lines_that_are_sent_again_are_not_there_twice(publishing: RunningProxy) -> None:
    trainer = await begun(publishing)
    lines = [{"step": 1, "metrics": {"reward/mean": 0.5}}]
    end = await trainer.append("steps", lines, at=0)
    status, answered = await trainer.try_to("steps", {"steps": lines}, method="POST", at=0)
    assert status == 409
    assert f"has {end} bytes" in answered["error"]["message"]
    await trainer.append("steps", [{"step": 2, "metrics": {}}], at=end)
    reader = Reader(publishing.http, publishing.url)
    shown = (await reader.get("run/metrics", run="foreign"))["steps"]
    assert [each["step"] for each in shown] == [1, 2]


async def test_requests_at_the_same_time_leave_whole_lines(publishing: RunningProxy) -> None:
    trainer = await begun(publishing)
    lines = [{"step": 1, "metrics": {f"own/{n}": 1.0 for n in range(100)}}] * 10
    await asyncio.gather(*(trainer.append("steps", lines) for _ in range(8)))
    reader = Reader(publishing.http, publishing.url)
    shown = (await reader.get("run/metrics", run="foreign"))["steps"]
    assert [len(each) for each in shown] == [102] * 80


async def test_continued_run_loses_the_steps_that_it_repeats(
    publishing: RunningProxy, tmp_path: Path
) -> None:
    trainer = await begun(publishing)
    for step in (1, 2, 3):
        await trainer.append("steps", [{"step": step, "metrics": {}}])
        await trainer.append("trials", [a_trial(step, f"t{step}", 1.0)])
        await trainer.send("tokens", TOKENS | {"step": step})
    await trainer.send("", {"config": {"lr": 1}, "last_step": 1})
    folder = tmp_path / "published" / "foreign"
    assert [each["step"] for each in read_jsonl(folder / "metrics.jsonl")] == [1]
    assert [each["step"] for each in read_jsonl(folder / "trials.jsonl")] == [1]
    assert [each.name for each in (folder / "tokens").iterdir()] == ["step-000001"]


async def test_bounds_of_a_published_run(
    publishing: RunningProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = await begun(publishing)
    await trainer.send("tokens", TOKENS)
    first = tmp_path / "published" / "foreign" / "tokens" / "step-000001"
    size = sum(each.stat().st_size for each in first.iterdir())
    monkeypatch.setattr(published_run, "TOKEN_BYTES", 2 * size)
    for step in (2, 2, 3, 4):
        await trainer.send("tokens", TOKENS | {"step": step})
    assert sorted(each.name[-1] for each in first.parent.iterdir()) == ["3", "4"]
    assert np.load(first.with_name("step-000004") / "advantages.npy").dtype == np.float32
    monkeypatch.setattr(published_run, "MAX_FILE_BYTES", 50)
    body = {"steps": [{"step": 1, "metrics": {"x": 1.0}}] * 2}
    assert (await trainer.try_to("steps", body, method="POST"))[0] == 413
    monkeypatch.setattr(published_run, "MAX_RUNS", 1)
    other = ForeignTrainer(publishing, "other")
    status, answered = await other.try_to("", {"config": {}})
    assert status == 409
    assert "1 of 1 runs" in answered["error"]["message"]
    status, _ = await other.try_to("summary", {"status": "running"})
    assert status == 404
    assert (await ForeignTrainer(publishing, ".hidden").try_to("", {"config": {}}))[0] == 400


async def test_run_is_published_by_the_administrator_only(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    store = f"sqlite:///{tmp_path / 'sessions.db'}"
    proxy = await start_proxy(store=store, published_runs=tmp_path / "published")
    async with reading(tmp_path / "sessions.db") as browser:
        key = await new_key(browser, "ana")
    url, body = f"{proxy.url}/view/runs/foreign", {"config": dict[str, Any]()}
    for headers, status in (({}, 401), ({"Authorization": f"Bearer {key}"}, 403), (KEY, 200)):
        for method in ("PUT", "DELETE"):
            async with proxy.http.request(method, url, json=body, headers=headers) as response:
                assert response.status == status


async def test_server_without_a_folder_says_what_to_set(proxy: RunningProxy) -> None:
    status, answered = await ForeignTrainer(proxy).try_to("", {"config": {}})
    assert status == 404
    assert "published_runs" in answered["error"]["message"]


def test_run_that_the_page_shows_anyway_is_not_overwritten(tmp_path: Path) -> None:
    runs = PublishedRuns(tmp_path, ["run"])
    with pytest.raises(Exception, match="another run of this name"):
        runs.begin("run", {}, None)


async def test_lines_of_our_trainer_are_those_that_others_publish(
    start_proxy: StartProxy, checkpoint: Path, tmp_path: Path
) -> None:
    _, run = await training(start_proxy, begin(tmp_path / "run", checkpoint))
    await whole(run)
    for file, kind in ((run.folder.trials_log, TrialFields), (run.folder.phases, PhaseFields)):
        lines = [line.encode() for line in file.read_text().splitlines()]
        assert lines
        for line in lines:
            TypeAdapter(kind).validate_json(line, strict=True)
