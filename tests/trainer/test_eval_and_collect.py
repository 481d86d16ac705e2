"""`agentic-train eval`, `compare` and `collect` on a real proxy and a scripted engine."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import Qwen3Config

from agent_loop.endpoint_loop import Endpoint
from agent_loop.producers.trial_list import read_lines
from agent_loop.trajectory import flatten
from proxy.config import RenderingConfig
from proxy.extras.view.run_folder import RecordedRun
from proxy.records import SessionKind
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import load_tokenizer
from proxy.store import open_store
from proxy.store.protocol import SessionFilter
from proxy.testing.scripted_engine import ScriptedEngine, text_script
from tests.proxy.conftest import checkpoint, rendering, start_proxy
from tests.proxy.hosted_model import hosted_model
from trainer.cluster.device_plan import Gpu, RankTooLargeError, plan_devices
from trainer.cluster.local_engine import LocalReplica
from trainer.commands.compare import main as compare
from trainer.commands.sample_trials import TrialRun, open_folder, run_trials, trial_parts
from trainer.errors import ConfigError
from trainer.extras.sft.config import SftConfig
from trainer.extras.sft.demonstrations import read_demonstrations
from trainer.run.folder import RunFolder
from trainer.settings.sources import dump, load

__all__ = ["checkpoint", "rendering", "start_proxy"]

AGENT = """
import json, os, sys, urllib.request
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"messages": [{"role": "user", "content": os.environ["TASK_PROMPT"]}]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
if answer in json.load(open(os.environ["TASK_FILE"]))["good"]:
    open("solved", "w").close()
"""


async def agentic_train(*arguments: str) -> tuple[int | None, str]:
    """The command in its own process, which forks and handles signals."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "trainer.cli", *arguments),
        env={**os.environ, "OPENAI_API_KEY": "any", "OMP_NUM_THREADS": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return process.returncode, output.decode()


def write_config(folder: Path, model: Path, engine: str) -> str:
    """Two tasks: "Hello." solves the first one."""
    for name in ("train", "heldout"):
        tasks = [
            {"task_id": f"{name}-{good}", "prompt": "Say hello.", "good": [good]}
            for good in ("Hello.", "Bye.")
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(t) + "\n" for t in tasks))
    (folder / "agent.py").write_text(AGENT)
    settings = {
        "model": {"path": str(model)},
        "engine": {"urls": [engine]},
        "data": {
            "train_files": [str(folder / "train.jsonl")],
            "val_files": [str(folder / "heldout.jsonl")],
        },
        "remote_agent": {
            "command": {"argv": ["{python}", str(folder / "agent.py")]},
            "verifier": {"argv": ["test", "-f", "solved"]},
            "sandbox": "off",
        },
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return str(folder / "config.yaml")


def says(rendering: Rendering, text: str) -> ScriptedEngine:
    tokenizer = rendering.tokenizer
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    return ScriptedEngine(
        text_script(lambda _: text, decode=tokenizer.decode, encode=tokenizer.encode, end_ids=[end])
    )


def test_policy_as_judge_of_an_endpoint_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    path = write_config(tmp_path, checkpoint, "http://127.0.0.1:1")
    config = load([Path(path)], ["remote_agent.judge.model=policy"])
    endpoint = Endpoint("http://127.0.0.1:2", "sk-any", "some-model")
    run = TrialRun(config, tmp_path / "out", "val", 1, SessionKind.EVAL, endpoint)
    with pytest.raises(ConfigError, match=r"judge\.model=policy: agents call .* themselves"):
        run_trials(run)
    assert not (tmp_path / "out").exists()


def test_several_policies_are_refused_and_one_adapter_is_left_out(
    checkpoint: Path, tmp_path: Path
) -> None:
    path = write_config(tmp_path, checkpoint, "http://127.0.0.1:1")
    adapter = "model.lora={rank: 2, update: adapter, policy: planner}"
    several = load([Path(path)], [adapter, "trainer.policies={planner: {}}"])
    with pytest.raises(ConfigError, match=r"trainer\.policies \(planner\): these trials sample"):
        run_trials(TrialRun(several, tmp_path / "out", "val", 1, SessionKind.EVAL, None))
    assert not (tmp_path / "out").exists()
    one = TrialRun(load([Path(path)], [adapter]), tmp_path / "out", "val", 1, SessionKind.EVAL)
    assert trial_parts(one).config.model.policy == ""


class _NoEngine(Exception):
    """In place of the start of an engine."""


def test_trials_are_planned_without_a_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """On a GPU that has no room for a rank."""
    model = tmp_path / "model"
    settings = Qwen3Config(hidden_size=64, num_hidden_layers=2, vocab_size=256, head_dim=16)
    settings.save_pretrained(model)
    path = write_config(tmp_path, model, "http://127.0.0.1:1")
    words = ["engine.urls=[]", "engine.max_context_tokens=4096", "model.lora={rank: 2}"]
    config = load([Path(path)], [*words, "model.max_micro_batch_tokens=1000000"])
    gpus = (Gpu("made-up", 5 * 2**30),)
    with pytest.raises(RankTooLargeError):
        plan_devices(config, gpus)

    async def start(_: LocalReplica) -> None:
        raise _NoEngine

    monkeypatch.setattr("trainer.cluster.local.gpus_here", lambda: gpus)
    monkeypatch.setattr(LocalReplica, "start", start)
    run = TrialRun(config, tmp_path / "out", "val", 1, SessionKind.EVAL)
    with pytest.raises(_NoEngine):
        run_trials(run)
    (line,) = capfd.readouterr().out.splitlines()
    assert line.startswith("GPU 0 (made-up, 5.0 GiB): engine 0, ")
    assert "rank" not in line
    assert "adapters" not in line


def test_folder_without_a_trial_takes_another_configuration(
    checkpoint: Path, tmp_path: Path
) -> None:
    path = write_config(tmp_path, checkpoint, "http://127.0.0.1:1")
    run = TrialRun(load([Path(path)], []), tmp_path / "out", "val", 1, SessionKind.EVAL, None)
    failed = RunFolder.create(run.folder)
    failed.config.write_text("of a start that failed")
    failed.unlock()
    open_folder(run).unlock()
    assert failed.config.read_text() == dump(run.config)
    failed.config.write_text("of a run with trials")
    failed.trials_log.touch()
    with pytest.raises(ConfigError, match="has trials of another configuration"):
        open_folder(run)


@pytest.mark.long
async def test_evaluations_continue_and_are_compared(
    checkpoint: Path, rendering: Rendering, tmp_path: Path
) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    async with says(rendering, "Hello.") as engine:
        config = write_config(tmp_path, checkpoint, engine.url)
        begin = ("eval", "--config", config, "--out", first)
        code, said = await agentic_train(*begin, "--repeats", "1")
        assert code == 0, said
        assert len(engine.calls) == 2
        code, said = await agentic_train(*begin, "--repeats", "2")  # runs the missing trials
        assert code == 0, said
        assert len(engine.calls) == 4
    header, row = said.splitlines()[-3:-1]
    assert header.split()[:6] == ["source", "tasks", "trials", "failed", "mean", "reward"]
    assert row.split()[:6] == ["heldout", "2", "4", "0", "0.500", "0.500"]
    assert row.split()[-3] == "0.500"  # pass@2
    (evaluation,) = RecordedRun(Path(first)).summary()["evaluations"]
    assert (evaluation["success"], evaluation["trials"]) == (0.5, 4)
    summary = json.loads(Path(first, "summary.json").read_text())["eval"]["evaluation"]
    assert summary["per_source"]["heldout"]["interval"] == summary["interval"]
    code, said = await agentic_train(*begin, "rollout.temperature=0.5")
    assert code == 2
    assert "has trials of another configuration or model; choose another --out" in said

    async with says(rendering, "Bye.") as engine:
        config = write_config(tmp_path, checkpoint, engine.url)
        code, said = await agentic_train("eval", "--config", config, "--out", second)
        assert code == 0, said
    code, said = await agentic_train("compare", first, second)
    assert code == 0, said
    assert said.splitlines()[2].split() == [
        *(second, "2", "0.500", "+0.000", "[-1.000,", "+1.000]", "1", "1")
    ]


def a_run(folder: Path, **evaluations: list[float]) -> Path:
    """The folder of a training run with a trained trial and the rewards of evaluations by task."""
    folder.mkdir()
    (folder / "config.yaml").write_text("eval: {success_at: 1.0}")
    lines: list[dict[str, Any]] = [{"kind": "train", "group": "g", "task_id": "t", "reward": 0.0}]
    for name, rewards in evaluations.items():
        for task, reward in enumerate(rewards):
            lines.append(
                {"kind": "eval", "evaluation": name, "task_id": str(task), "reward": reward}
            )
    each = ({"step": 1, "trial_id": "a", "status": "done", "source": "s", **line} for line in lines)
    (folder / "trials.jsonl").write_text("".join(json.dumps(line) + "\n" for line in each))
    return folder


def test_training_runs_are_compared_by_their_last_evaluations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    low = a_run(tmp_path / "low", before=[0.0] * 10, after=[0.0] * 8 + [1.0] * 2)
    high = a_run(tmp_path / "high", before=[0.0] * 10, after=[1.0] * 10)
    assert compare(argparse.Namespace(folders=[low, high])) == 0
    _, first, second = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert first == [str(low), "(after)", "10", "0.200"]
    assert second[:5] == [str(high), "(after)", "10", "1.000", "+0.800"]
    assert second[-2:] == ["8", "0"]
    assert compare(argparse.Namespace(folders=[high])) == 0
    _, first, second = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert (first[1], second[1], second[4]) == ("(before)", "(after)", "+1.000")


def test_compare_refuses_what_has_no_evaluation_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, why in (
        (a_run(tmp_path / "trained"), "has no finished trial on held-out tasks"),
        (tmp_path, "no evaluation and no run; give the --out of agentic-train eval"),
    ):
        assert compare(argparse.Namespace(folders=[folder])) == 2
        said = capsys.readouterr().err
        assert why in said
        assert said.count("\n") == 1


@pytest.mark.long
async def test_endpoint_is_evaluated_without_our_engine(
    checkpoint: Path, rendering: Rendering, tmp_path: Path, start_proxy: object
) -> None:
    proxy = await start_proxy(sessions={"auto_create": True})  # type: ignore[operator]
    config = write_config(tmp_path, checkpoint, "http://127.0.0.1:9")
    out = tmp_path / "baseline"
    endpoint = ("--model", f"{proxy.url}/baseline", "--model-name", "gpt")
    code, said = await agentic_train("eval", "--config", config, "--out", str(out), *endpoint)
    assert code == 0, said
    lines = read_lines(out / "trials.jsonl")
    assert sorted(line.reward or 0.0 for line in lines) == [0.0, 1.0]
    assert len(proxy.engine.calls) == 2
    code, said = await agentic_train("eval", "--config", config, "--out", "x", *endpoint[:2])
    assert code == 2
    assert "--model-name: missing" in said


@pytest.mark.long
async def test_collected_sessions_have_rewards_and_can_be_exported(
    checkpoint: Path, rendering: Rendering, tmp_path: Path
) -> None:
    out = tmp_path / "collected"
    async with says(rendering, "Hello.") as engine:
        config = write_config(tmp_path, checkpoint, engine.url)
        arguments = ("collect", "--config", config, "--out", str(out), "--repeats", "2")
        code, said = await agentic_train(*arguments)
        assert code == 0, said
        code, said = await agentic_train(*arguments)  # nothing is left to do
        assert (code, len(engine.calls)) == (0, 4), said
    store = await open_store(f"sqlite:///{out}/sessions.db")
    sessions = await store.list_sessions(SessionFilter())
    await store.close()
    rewards = [(s.metadata["task_id"], s.rewards[0].value) for s in sessions]
    assert sorted(rewards) == [("train-Bye.", 0.0)] * 2 + [("train-Hello.", 1.0)] * 2
    assert {session.kind.value for session in sessions} == {"train"}
    exported = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "proxy", "export", "--store", f"sqlite:///{out}/sessions.db"),
        *("--format", "trl", "--out", str(tmp_path / "rows.jsonl")),
        stdout=asyncio.subprocess.PIPE,
    )
    assert (await exported.communicate())[0] == f"4 rows in {tmp_path}/rows.jsonl\n".encode()


async def test_sessions_of_a_hosted_teacher_are_collected_to_fine_tune_on(
    checkpoint: Path, tmp_path: Path
) -> None:
    out = tmp_path / "teacher"
    async with hosted_model() as teacher:
        teacher.says = [({"content": "Hello.", "reasoning_content": "A greeting."}, "stop")]
        config = write_config(tmp_path, checkpoint, "http://127.0.0.1:9")
        endpoint = ("--model", f"{teacher.url}/v1", "--model-name", "teacher-1")
        code, said = await agentic_train(
            "collect", "--config", config, "--out", str(out), *endpoint
        )
        assert code == 0, said
        assert [body["model"] for body in teacher.bodies] == ["teacher-1"] * 2
    assert f"agentic-train sft sft.sessions=[{out}] sft.kind=eval" in said
    found = await read_demonstrations(
        SftConfig(sessions=(str(out),), kind="eval", min_reward=1.0),
        checkpoint,
        RenderingConfig(),
        context_tokens=2048,
    )
    (only,) = found.found
    assert (only.task_id, only.source) == ("train-Hello.", "rendered")
    (path,) = flatten(only.rollout.segments)
    tokenizer = load_tokenizer(checkpoint)
    answer = "<think>\nA greeting.\n</think>\n\nHello.<|im_end|>"
    assert tokenizer.decode(path.ids[path.mask].tolist()) == answer
