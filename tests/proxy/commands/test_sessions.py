"""The output of `agentic-proxy sessions` and `replay`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from proxy.cli import main
from proxy.client import SessionHandle
from proxy.records import Mark, Reward, RuleAction, SessionKind
from proxy.store import open_store
from tests.proxy.conftest import ADMIN_KEY, RunningProxy
from tests.proxy.store.test_conformance import a_session

CHAT = "chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hi."}]}


@pytest.fixture
async def session(proxy: RunningProxy) -> SessionHandle:
    """Two turns on one path, and a fork from the first."""
    session = await proxy.session(SessionKind.TRAIN, trial_id="team/run-1")
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Hi."}]
    _, reply = await proxy.post(session, CHAT, {"messages": messages})
    messages += [reply["choices"][0]["message"], {"role": "user", "content": "Go on."}]
    await proxy.post(session, CHAT, {"messages": messages})
    messages[1] = {"role": "assistant", "content": "Another."}
    await proxy.post(session, CHAT, {"messages": messages})
    await proxy.control.add_reward(session.trial_id, Reward("verifier", 0.5))
    return session


async def run(tmp_path: Path, *arguments: str) -> int:
    """Runs the command in a thread, because the fixtures' servers run in this event loop."""
    store = f"sqlite:///{tmp_path}/proxy.db"
    return await asyncio.to_thread(main, [*arguments, "--store", store])


@pytest.mark.usefixtures("session")
async def test_list_shows_turns_forks_and_rewards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await run(tmp_path, "sessions", "list") == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header.split() == [
        "trial",
        "kind",
        "status",
        "turns",
        "forks",
        "sampled",
        "rewards",
        "marks",
        "lasted",
        "folder",
        "branch",
        "asked",
    ]
    assert line.split()[:5] == ["team/run-1", "train", "open", "3", "edited:1"]
    assert line.split()[-3:] == ["verifier=0.5", "0:00", "Hi."]
    assert await run(tmp_path, "sessions", "list", "--marked", "*") == 0
    assert "team/run-1" not in capsys.readouterr().out
    store = await open_store(f"sqlite:///{tmp_path}/proxy.db")
    await store.browser.add_mark("team/run-1", Mark("odd", RuleAction.END, 1, 1.0, "\x1b[31m"))
    await store.close()
    assert await run(tmp_path, "sessions", "list", "--marked", "odd") == 0
    assert "odd:end" in capsys.readouterr().out.split()
    assert await run(tmp_path, "sessions", "show", "team/run-1") == 0
    assert "turn 1 matches rule odd (end): ␛[31m" in capsys.readouterr().out
    assert await run(tmp_path, "sessions", "list", "--kind", "eval") == 0
    assert "team/run-1" not in capsys.readouterr().out


async def test_list_has_the_newest_sessions_and_says_how_many_are_older(
    proxy: RunningProxy,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [f"s-{n:03}" for n in reversed(range(52))]  # the newest is first in the list
    for name in names:
        await proxy.control.create_session(name)

    async def listed(*arguments: str) -> tuple[list[str], str]:
        assert await run(tmp_path, "sessions", "list", *arguments) == 0
        said = capsys.readouterr()
        return [line.split()[0] for line in said.out.splitlines()[1:]], said.err

    assert await listed() == (sorted(names), "")
    assert await listed("--last", "2") == (["s-000", "s-001"], "50 older sessions: --last 52\n")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    on_a_terminal, told = await listed()
    assert (len(on_a_terminal), told) == (50, "2 older sessions: --last 52\n")
    assert await run(tmp_path, "sessions", "list", "--last", "0") == 2
    assert "--last 0: give a number of at least 1" in capsys.readouterr().err


async def test_list_shows_where_it_was_and_what_the_user_asked_for(
    proxy: RunningProxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "Fix the test.\nAnd the other."
    added = "<system-reminder>\nToday is \n<b>Monday</b>.</system-reminder>\n"
    for name, contents in (
        ("claude", [added + words]),
        ("codex", ["<environment_context>\n/work\n</environment_context>", words]),
        ("long", ["x" * 100 + "\x1b[31m"]),
        ("tags", ["<p>1</p>"]),
    ):
        session = await proxy.control.create_session(name, metadata={"folder": "/home/me/shop"})
        messages = [{"role": "user", "content": content} for content in contents]
        await proxy.post(session, CHAT, {"messages": messages})
    assert await run(tmp_path, "sessions", "list") == 0
    _, claude, codex, long, tags = capsys.readouterr().out.splitlines()
    assert claude.split()[-4:] == ["shop", "Fix", "the", "test."]
    assert codex.split()[-4:] == ["shop", "Fix", "the", "test."]
    assert long.split()[-1] == "x" * 59 + "…"
    assert tags.split()[-1] == "shop"


async def test_list_has_the_sessions_in_which_words_were_written_and_where(
    proxy: RunningProxy,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("proxy.search.record.TURNS", 2)
    asked = {"till": "Fix the till\x1b[31m, please.", "door": "Oil the door."}
    for name, text in asked.items():
        session = await proxy.session(trial_id=name)
        body = {"messages": [{"role": "user", "content": text}]}
        assert (await proxy.post(session, CHAT, body))[0] == 200
    for _ in range(3):  # newer than what is found
        assert (await proxy.post(session, CHAT, HELLO))[0] == 200
    assert await run(tmp_path, "sessions", "list", "--search", "the TILL") == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header.split()[-1] == "found"
    assert line.split()[0] == "till"
    assert line.endswith("turn 0, user: …Fix the till␛[31m, please.…")
    assert await run(tmp_path, "sessions", "list", "--search", "hello", "--prefix", "d") == 0
    _, line = capsys.readouterr().out.splitlines()
    assert line.endswith("turn 3, assistant: …Hello.…")
    assert await run(tmp_path, "sessions", "list", "--search", "sum(") == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert await run(tmp_path, "sessions", "list", "--search", "") == 2
    assert "--search: give" in capsys.readouterr().err


async def test_ratings_are_rewards_that_the_user_may_change_and_comments_are_shown(
    proxy: RunningProxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session = await proxy.control.create_session("one")
    for words in (["up"], ["down", "--comment", "It deleted\x1b[2J the tests."], ["0.25"]):
        assert await run(tmp_path, "sessions", "rate", "one", *words) == 0
    await proxy.control.complete(session.trial_id)
    assert await run(tmp_path, "sessions", "rate", "one", "-1.5") == 0
    (reward,) = (await proxy.control.show("one"))["rewards"]
    assert (reward["key"], reward["value"]) == ("rating", -1.5)
    assert await run(tmp_path, "sessions", "show", "one") == 0
    shown = capsys.readouterr().out
    assert "reward rating = -1.5" in shown
    assert "rated 0: It deleted␛[2J the tests." in shown
    for wrong in ("good", "nan", "1e999"):
        assert await run(tmp_path, "sessions", "rate", "one", wrong) == 2
        assert f"{wrong}: give up, down, or a number" in capsys.readouterr().err
    assert await run(tmp_path, "sessions", "rate", "none", "up") == 2


async def test_tags_are_set_and_removed_and_select_what_is_exported(
    proxy: RunningProxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await proxy.control.create_session("one", metadata={"folder": "/home/me/shop"})
    assert await run(tmp_path, "sessions", "tag", "one", "topic=tests", "keep=yes") == 0
    assert await run(tmp_path, "sessions", "tag", "one", "topic=a=b", "keep=") == 0
    shown = await proxy.control.show("one")
    assert shown["metadata"] == {"folder": "/home/me/shop", "topic": "a=b"}
    for wrong, why in (("topic", "give NAME=VALUE"), ("=x", "give NAME=VALUE")):
        assert await run(tmp_path, "sessions", "tag", "one", wrong) == 2
        assert why in capsys.readouterr().err
    assert await run(tmp_path, "sessions", "tag", "one", f"{'n' * 81}=x") == 2
    assert "the name has 81 characters; give 1 to 80" in capsys.readouterr().err
    assert await run(tmp_path, "sessions", "tag", "none", "a=b") == 2
    assert "is not in this store" in capsys.readouterr().err
    assert await run(tmp_path, "sessions", "rate", "this", "up") == 2
    assert "none that `agentic-proxy run` started" in capsys.readouterr().err


async def test_session_is_deleted_also_if_its_agent_has_ended_without_completing_it(
    proxy: RunningProxy,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AGENTIC_PROXY_ADMIN_KEY", "another")
    for name in ("ended", "open"):
        left = await proxy.session(trial_id=name)
        assert (await proxy.post(left, CHAT, HELLO))[0] == 200
    await proxy.control.complete("ended")
    assert await run(tmp_path, "sessions", "delete", "ended") == 0
    # The proxy that serves the store, whatever its port, ends an open one, if it gets its key.
    assert await run(tmp_path, "sessions", "delete", "open") == 2
    said = capsys.readouterr().err
    assert "401" in said
    store = f"--store sqlite:///{tmp_path}/proxy.db\n"
    assert said.endswith(f"agentic-proxy sessions delete open --url http://HOST:PORT {store}")
    monkeypatch.delenv("AGENTIC_PROXY_ADMIN_KEY")
    (tmp_path / "proxy.db.admin-key").write_text(f"{ADMIN_KEY}\nan-older-one\n")
    assert await run(tmp_path, "sessions", "delete", "open", "--url", "http://127.0.0.1:9") == 2
    assert "the proxy at http://127.0.0.1:9 did not answer" in capsys.readouterr().err
    assert await run(tmp_path, "sessions", "list", "--url", proxy.url) == 0
    assert "open" in capsys.readouterr().out
    assert await run(tmp_path, "sessions", "delete", "open") == 0
    assert (await proxy.post(left, CHAT, HELLO))[0] == 401
    for name in ("ended", "open"):
        assert await run(tmp_path, "sessions", "delete", name) == 2
        assert "is not in this store" in capsys.readouterr().err


async def test_session_with_a_call_in_flight_is_not_deleted(
    proxy: RunningProxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session = await proxy.session(trial_id="one")
    proxy.engine.token_delay_s = 600
    calling = asyncio.create_task(proxy.post(session, CHAT, HELLO))
    await proxy.engine.called.wait()
    assert await run(tmp_path, "sessions", "delete", "one") == 2
    assert "turn 0 is being answered; end its agent first" in capsys.readouterr().err
    calling.cancel()


@pytest.mark.usefixtures("session")
async def test_store_of_a_run_is_named_by_the_runs_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs" / "first"
    folder.mkdir(parents=True)
    listing = ["sessions", "list", "--store", str(folder)]
    assert await asyncio.to_thread(main, listing) == 2
    assert f"the file {folder}/sessions.db does not exist" in capsys.readouterr().err
    (folder / "sessions.db").symlink_to(tmp_path / "proxy.db")
    assert await asyncio.to_thread(main, listing) == 0
    assert "team/run-1" in capsys.readouterr().out


async def test_open_session_of_a_proxy_that_has_stopped_is_deleted(tmp_path: Path) -> None:
    store = await open_store(f"sqlite:///{tmp_path}/proxy.db")
    await store.create_session(a_session("left"))
    await store.close()
    assert await run(tmp_path, "sessions", "delete", "left") == 0


async def test_list_shows_names_that_look_like_markup(
    proxy: RunningProxy,
    session: SessionHandle,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    await proxy.control.add_reward(session.trial_id, Reward("[/b]\x1b[31m", 1.0))
    assert await run(tmp_path, "sessions", "list") == 0
    assert "[/b]␛[31m=1" in capsys.readouterr().out


@pytest.mark.usefixtures("session")
async def test_show_prints_the_whole_conversation_if_it_has_a_tokenizer(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await run(tmp_path, "sessions", "show", "team/run-1") == 0
    out = capsys.readouterr().out
    assert "turn 2 done after turn 0 (edited)" in out
    assert "Hello." in out
    assert "add --model FOLDER" in out
    show = ("sessions", "show", "team/run-1", "--model", str(checkpoint))
    assert await run(tmp_path, *show) == 0
    out = capsys.readouterr().out
    assert "<|im_start|>user\nHi.<|im_end|>" in out
    assert "<|im_start|>user\nGo on.<|im_end|>" in out
    assert "Hello.<|im_end|>" in out
    assert "add --model" not in out
    assert await run(tmp_path, *show, "--tokens") == 0
    assert "<|im_end|>[" in capsys.readouterr().out
    assert await run(tmp_path, "sessions", "show", "team/run-1", "--tokens") == 2
    assert "needs --model FOLDER" in capsys.readouterr().err
    assert await run(tmp_path, "sessions", "show", "unknown") == 2
    assert "`agentic-proxy sessions list` lists them" in capsys.readouterr().err


async def test_replay_exits_with_1_if_a_difference_exceeds_the_tolerance(
    tmp_path: Path,
    proxy: RunningProxy,
    session: SessionHandle,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = ("replay", session.trial_id, "--engine", proxy.engine.url, "--tolerance", "1e-3")
    assert await run(tmp_path, *arguments) == 0
    out = capsys.readouterr().out
    assert "3 of 3 turns compared, largest difference 0.00e+00" in out

    monkeypatch.setattr(
        "proxy.testing.scripted_wires._scored",
        lambda ids: [None, *({str(token): {"logprob": -0.1}} for token in ids[1:])],
    )
    assert await run(tmp_path, *arguments) == 1
    assert "exceeds --tolerance" in capsys.readouterr().err


async def test_turn_with_other_sampling_parameters_is_scored_token_by_token(
    tmp_path: Path, proxy: RunningProxy, capsys: pytest.CaptureFixture[str]
) -> None:
    session = await proxy.session(sampling={"temperature": 0.5, "top_p": 0.9})
    await proxy.post(session, CHAT, {"messages": [{"role": "user", "content": "Hi."}]})
    _, (turn,) = await proxy.record(session)
    before = len(proxy.engine.calls)
    assert await run(tmp_path, "replay", session.trial_id, "--engine", proxy.engine.url) == 0
    assert "1 of 1 turns compared, largest difference 0.00e+00" in capsys.readouterr().out
    asked = proxy.engine.calls[before:]
    assert len(asked) == len(turn.sampled_ids) > 1
    assert {(call.sampling["temperature"], call.sampling["top_p"]) for call in asked} == {
        (0.5, 0.9)
    }


async def test_replay_names_the_turns_that_cannot_be_compared(
    tmp_path: Path, proxy: RunningProxy, capsys: pytest.CaptureFixture[str]
) -> None:
    session = await proxy.session(SessionKind.EVAL)
    messages = [{"role": "user", "content": "Hi."}]
    await proxy.post(session, CHAT, {"messages": messages, "frequency_penalty": 0.5})
    await run(tmp_path, "replay", session.trial_id, "--engine", proxy.engine.url)
    out = capsys.readouterr().out
    assert "turn 0: was sampled with frequency_penalty" in out
    assert "0 of 1 turns compared" in out
