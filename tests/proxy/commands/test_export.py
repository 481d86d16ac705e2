"""`agentic-proxy export`: which sessions it selects, and the files that it writes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import datasets
import orjson
import pyarrow.parquet as pq
import pytest

from proxy.cli import main
from proxy.extras.export.registry import FORMATS
from proxy.records import Origin, Reward, Session, SessionKind, Turn
from proxy.records.binary import decode_record
from tests.proxy.conftest import RunningProxy

CHAT = "chat/completions"


async def run(tmp_path: Path, *arguments: str) -> int:
    """Runs the command in a thread, because the fixtures' servers run in this event loop."""
    store = f"sqlite:///{tmp_path}/proxy.db"
    return await asyncio.to_thread(main, ["export", *arguments, "--store", store])


@pytest.fixture
async def sessions(proxy: RunningProxy) -> None:
    """Two sessions of one task with the rewards 1 and 0, one without a reward, one of kind eval."""
    for name, reward in (("a-1", 1.0), ("a-0", 0.0), ("no-reward", None), ("eval", 1.0)):
        session = await proxy.session(
            SessionKind.EVAL if name == "eval" else SessionKind.TRAIN,
            trial_id=name,
            metadata={"task_id": name[0], "source": "letters"},
        )
        proxy.answers(f"I am {name}.")
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Hi."}]
        _, reply = await proxy.post(session, CHAT, {"messages": messages})
        messages += [reply["choices"][0]["message"], {"role": "user", "content": "Go on."}]
        await proxy.post(session, CHAT, {"messages": messages})
        if reward is not None:
            await proxy.control.add_reward(name, Reward("verifier", reward))


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in file.read_bytes().splitlines()]


@pytest.mark.usefixtures("sessions")
@pytest.mark.parametrize("name", FORMATS)
async def test_every_format_is_written_to_all_kinds_of_files(name: str, tmp_path: Path) -> None:
    outs = [tmp_path / "out.jsonl", tmp_path / "out.parquet", tmp_path / "dataset"]
    for out in outs:
        assert await run(tmp_path, "--format", name, "--out", str(out)) == 0
    rows = rows_of(outs[0])
    assert rows
    parquet = pq.read_table(outs[1]).to_pylist()
    dataset = datasets.load_from_disk(str(outs[2])).to_list()
    assert parquet == dataset
    for row, flat in zip(rows, parquet, strict=True):
        assert row.keys() == flat.keys()
        for key, value in row.items():
            is_json = isinstance(flat[key], str) and not isinstance(value, str)
            assert (orjson.loads(flat[key]) if is_json else flat[key]) == value, key


@pytest.mark.usefixtures("sessions")
async def test_sessions_that_cannot_be_trained_are_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    assert await run(tmp_path, "--format", "prime-rl", "--out", str(out)) == 0
    said = capsys.readouterr()
    assert said.out == f"2 rows in {out}\n"
    assert "1 sessions without a reward (give one: agentic-proxy sessions rate ID up)" in said.err
    assert "left out: 1 sessions of kind eval (export them with --kind eval)" in said.err
    means = [max(row["advantages"], key=abs) for row in rows_of(out)]
    assert sorted(means) == [-0.5, 0.5]  # the task's mean reward is 0.5
    assert await run(tmp_path, "--format", "trl", "--kind", "eval", "--out", str(out)) == 0
    assert [row["trial_id"] for row in rows_of(out)] == ["eval"]


@pytest.mark.usefixtures("sessions")
@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["a-1", "eval"], ["a-1", "eval"]),
        (["--tag", "task_id=a"], ["a-0", "a-1"]),
        (["--min-reward", "0.5"], ["a-1", "eval"]),
        (["--max-reward", "0.5"], ["a-0"]),
        (["--reward", "other"], ["a-0", "a-1", "eval", "no-reward"]),
        (["--reward", "other", "--min-reward", "0"], []),
        (["--prefix", "a-", "--kind", "train"], ["a-0", "a-1"]),
        (["--where", f"{__name__}:says_eval"], ["eval"]),
    ],
)
async def test_filters_select_sessions(
    arguments: list[str], wanted: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    assert await run(tmp_path, *arguments, "--format", "messages", "--out", str(out)) == 0
    assert sorted(row["trial_id"] for row in rows_of(out)) == wanted


def says_eval(session: Session, turns: list[Turn]) -> bool:
    return b"I am eval." in turns[0].answer


async def test_binary_records_are_the_record_itself(tmp_path: Path, proxy: RunningProxy) -> None:
    session = await proxy.session(trial_id="team/run-1")
    await proxy.post(session, CHAT, {"messages": [{"role": "user", "content": "Hi."}]})
    record, turns = await proxy.record(session)
    assert await run(tmp_path, "--format", "records", "--out", str(tmp_path / "records")) == 0
    (file,) = (tmp_path / "records").iterdir()
    assert file.name == "team%2Frun-1.record"
    decoded, decoded_turns = decode_record(file.read_bytes())
    assert (decoded, len(decoded_turns)) == (record, len(turns))


@pytest.mark.usefixtures("sessions")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "csv", "--out", "x.jsonl"], "--format: 'csv' is unknown; use one of atif,"),
        (["--out", "x.csv"], "is neither FILE.jsonl, FILE.parquet nor the name of a folder"),
        (["--tag", "task", "--out", "x.jsonl"], "--tag task: give NAME=VALUE"),
        (["unknown", "--out", "x.jsonl"], "session 'unknown' is not in this store"),
        (["--where", "nowhere:f", "--out", "x.jsonl"], "--where: cannot import nowhere:f"),
    ],
)
async def test_wrong_arguments_are_refused(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert await run(tmp_path, *arguments) == 2
    assert message in capsys.readouterr().err


async def test_secrets_of_a_session_itself_are_masked_wherever_they_stand(
    proxy: RunningProxy, checkpoint: Path, tmp_path: Path
) -> None:
    """Of its metadata, and of what a branch begins with. An id of many bytes is no obstacle."""
    name = "a/" * 100 + "end"
    session = await proxy.session(trial_id=name, metadata={"db_password": "x7!kPq2zz"})
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Use x7!kPq2zz."}]
    proxy.answers("I use x7!kPq2zz.")
    await proxy.post(session, CHAT, {"messages": messages})
    origin = Origin(name, 1, system="Write to ann@corp.com", answer="To ann@corp.com.")
    await proxy.control.branch(origin, "branch")
    for form, out in (("messages", tmp_path / "rows.jsonl"), ("records", tmp_path / "records")):
        arguments = ["--format", form, "--model", str(checkpoint), "--out", str(out)]
        assert await run(tmp_path, *arguments) == 0
    files = [tmp_path / "rows.jsonl", *(tmp_path / "records").iterdir()]
    assert len(files) == 3
    records = {decode_record(file.read_bytes())[0].session_id: file for file in files[1:]}
    assert set(records) == {name, "branch"}
    for file in (files[0], records[name]):
        assert b"kPq2" not in file.read_bytes()
    assert not any(b"ann@" in file.read_bytes() for file in files)
