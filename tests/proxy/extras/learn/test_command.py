"""`agentic-proxy policy`, `serve --learn`, and what `run` notes about a folder."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
from argparse import Namespace
from pathlib import Path

import pytest

from proxy.config import load_config
from proxy.errors import ConfigurationError
from proxy.extra import open_extras
from proxy.extras.learn import extra
from proxy.extras.learn.command import described, policy
from proxy.extras.learn.extra import Learning, LearnSection
from proxy.extras.learn.section import Recorder, read_recorder, with_learners
from tests.proxy.conftest import ADMIN_KEY, StartProxy
from tests.proxy.extras.learn.test_recorder import client, ended, learners


def test_what_is_said_of_a_policy() -> None:
    state = {"stable": 3, "canary": 5, "share": 0.5, "frozen": False, "order": "", "open": {}}
    assert described("work", state) == "work: stable 3, canary 5 for 50 % of new sessions"
    more = {"canary": None, "frozen": True, "order": "promote", "open": {"work-3": 2}}
    assert described("work", state | more) == (
        "work: stable 3, no canary; frozen; promote ordered; the learner does the rest; open"
        " sessions: work-3 2"
    )


async def test_a_person_orders_by_the_command(
    start_proxy: StartProxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    proxy = await start_proxy(**learners(tmp_path))
    monkeypatch.setenv("AGENTIC_PROXY_ADMIN_KEY", ADMIN_KEY)

    async def ordered(action: str) -> str:
        arguments = Namespace(action=action, name="ann", url=proxy.url, config=None)
        assert await asyncio.to_thread(policy, arguments) == 0
        return capsys.readouterr().out.strip()

    assert await ordered("show") == "ann: stable 0, no canary"
    assert await ordered("freeze") == "ann: stable 0, no canary; frozen"
    with pytest.raises(ConfigurationError, match="there is no canary"):
        await ordered("promote")


def test_serve_with_learn_adds_the_extra(tmp_path: Path) -> None:
    file = tmp_path / "learn.yaml"
    file.write_text(f"recorder: {{policy: mine, folder: {tmp_path}/mine}}\nengines: [x]\n")
    config = with_learners(load_config(None, model=tmp_path), [file])
    (learning,) = [each for each in open_extras(config) if isinstance(each, Learning)]
    assert learning._start == (file,)
    apart = open_extras(with_learners(load_config(None, model=tmp_path), [file], start=False))
    assert [each._start for each in apart if isinstance(each, Learning)] == [()]
    with pytest.raises(ConfigurationError, match="names must differ"):
        open_extras(with_learners(load_config(None, model=tmp_path), [file, file]))
    file.write_text("recorder: {policy: 'a b'}")
    with pytest.raises(ConfigurationError, match="policy"):
        read_recorder(file)
    with pytest.raises(ConfigurationError, match="cannot read"):
        read_recorder(tmp_path / "none.yaml")


async def test_a_persons_sessions_are_not_the_teams(
    start_proxy: StartProxy, checkpoint: Path, tmp_path: Path
) -> None:
    """As docs/learn.md says: the team's file names nobody, so it comes last."""
    page = Path("docs/learn.md").read_text(encoding="utf-8")
    (line,) = re.findall("`(serve --learn .*?)`", page)
    files = [tmp_path / word for word in shlex.split(line) if word.endswith(".yaml")]
    assert [file.stem for file in files] == ["ann", "team"]
    for file in files:
        only = {"only": {"person": "ann"}} if file.stem == "ann" else {}
        section = {"policy": file.stem, "folder": str(tmp_path / file.stem), **only}
        file.write_text(json.dumps({"recorder": section}), encoding="utf-8")
    extras = with_learners(load_config(None, model=checkpoint), files, start=False).extras
    proxy = await start_proxy(extras=[each.model_dump() for each in extras])
    names = {who: await ended(proxy, learn="yes", person=who) for who in ("ann", "bob")}
    for policy_name, who in (("ann", "ann"), ("team", "bob")):
        async with client(proxy, tmp_path, policy_name) as learner:
            found = await learner.readable(policy_name)
            assert [each["trial_id"] for each in found] == [names[who]]


async def test_a_learner_runs_as_long_as_the_recorder(
    start_proxy: StartProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner is a program that says that it runs, and ends when it is asked to."""
    program = (
        "import signal, sys, pathlib; path = pathlib.Path(sys.argv[3]);"
        "path.with_suffix('.runs').write_text('yes');"
        "signal.sigwait({signal.SIGTERM}); path.with_suffix('.ended').write_text('yes')"
    )
    monkeypatch.setattr(
        extra, "_TRAIN", f"import signal; signal.pthread_sigmask(0, {{15}}); {program}"
    )
    file = tmp_path / "learn.yaml"
    os.mkfifo(file.with_suffix(".runs"))
    learning = Learning([Recorder(policy="mine", folder=tmp_path / "mine")], [file])
    monkeypatch.setattr(LearnSection, "build", lambda _: learning)
    await start_proxy(**learners(tmp_path))
    await asyncio.wait_for(asyncio.to_thread(file.with_suffix(".runs").read_text), 30)
    await learning.close()
    assert file.with_suffix(".ended").exists()


@pytest.mark.parametrize("workers", [2])
def test_several_processes_are_refused(tmp_path: Path, workers: int) -> None:
    learning = Learning([Recorder(policy="mine", folder=tmp_path / "mine")])
    config = load_config(None, model=tmp_path, workers=workers)

    class Core:
        pass

    core = Core()
    core.config = config  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match="has one process"):
        asyncio.run(learning.open(core))  # type: ignore[arg-type]
