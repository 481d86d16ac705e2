"""The verl plug-in inside verl's own worker classes; only verl's rollout servers are scripted."""

from __future__ import annotations

import importlib.util
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_loop.errors import AgentLoopError
from proxy.client import ProxyClient, ProxyClientError
from proxy.errors import ConfigurationError
from proxy.machine import landlock
from proxy.testing.scripted_engine import scripted_logprob
from tests.needs import skip_or_fail
from tests.proxy.checkpoint import write_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")  # verl's own
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    if importlib.util.find_spec("verl") is None:
        skip_or_fail(
            "verl is not installed: python -m benchmarks.install reference", at_import=True
        )
    import ray
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf
    from verl.experimental.agent_loop import AgentLoopWorker
    from verl.protocol import DataProto
    from verl.trainer.ppo.v1 import agent_loop_tq
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.replica import TokenOutput

    from agent_loop.extras.ray.here import RayHere
    from agent_loop.extras.verl import agent_loop as verl_loop
    from agent_loop.extras.verl.agent_loop import AgenticLoop, Recorder, VerlSampling, task_of

AGENT = Path(__file__).parent / "forking_agent.py"


class ScriptedClient(LLMServerClient):
    """A client without servers: keeps sessions and prompts, and gives scripted answers."""

    def __init__(self, answer: list[int], step: int = 7) -> None:
        self.answer = answer
        self.step = step
        self.log_probs = True
        self.calls: list[tuple[str, list[int], dict[str, Any]]] = []

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> TokenOutput:
        self.calls.append((request_id, prompt_ids, sampling_params))
        path = [prompt_ids[-1], *self.answer]
        pairs = zip(path, self.answer, strict=False)
        return TokenOutput(
            token_ids=self.answer,
            log_probs=[scripted_logprob(a, b) for a, b in pairs] if self.log_probs else None,
            stop_reason="completed",
            extra_fields={"global_steps": self.step, "min_global_steps": self.step},
        )


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_checkpoint(tmp_path_factory.mktemp("verl-model"))
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "vocab_size": 640,
        "max_position_embeddings": 4096,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def settings(tmp_path: Path, verifier: str = "0.5") -> dict[str, Any]:
    code = f"import os; open(os.environ['REWARD_DIR'] + '/reward.txt', 'w').write('{verifier}')"
    return {
        "command": {"argv": [sys.executable, str(AGENT)]},
        "verifier": {"argv": [sys.executable, "-c", code]},
        "trials_dir": str(tmp_path / "trials"),
        "timeout_s": 30,
        "max_retries": 0,
        "sandbox": "light without ports, processes, sockets",
    }


def verl_config(model: Path, given: dict[str, Any] | None, **rollout: Any) -> Any:
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer")
    OmegaConf.set_struct(config, False)
    config.actor_rollout_ref.model.path = str(model)
    config.actor_rollout_ref.rollout.name = "vllm"
    config.actor_rollout_ref.rollout.prompt_length = 512
    config.actor_rollout_ref.rollout.response_length = 512
    config.actor_rollout_ref.rollout.agent.default_agent_loop = "agentic"
    config.actor_rollout_ref.rollout.temperature = 0.7
    for key, value in rollout.items():
        OmegaConf.update(config.actor_rollout_ref.rollout, key, value)
    if given is not None:
        config.remote_agent = given
    return config


@pytest.fixture
def client(model: Path) -> ScriptedClient:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    ids = {t["content"]: t["id"] for t in tokenizer["added_tokens"]}
    return ScriptedClient([40, 41, 42, ids["<|im_end|>"]])


def batch(*prompts: str) -> DataProto:
    columns = {
        "raw_prompt": [[{"role": "user", "content": prompt}] for prompt in prompts],
        "instance_id": [f"task/{i}" for i in range(len(prompts))],
        "index": list(range(len(prompts))),
        "data_source": ["sums"] * len(prompts),
    }
    arrays = {}
    for name, values in columns.items():
        arrays[name] = np.empty(len(prompts), dtype=object)
        arrays[name][:] = values
    return DataProto(batch=None, non_tensor_batch=arrays, meta_info={"global_steps": 7})


async def test_v0_gets_one_padded_row_per_trial(
    model: Path, client: ScriptedClient, tmp_path: Path
) -> None:
    worker = AgentLoopWorker(verl_config(model, settings(tmp_path)), client)

    rows = await worker.generate_sequences(batch("What is 1 + 2?", "And with a sub-agent?"))

    assert rows.batch["prompts"].shape == rows.batch["responses"].shape == (2, 512)
    for index in range(2):
        mask = rows.batch["response_mask"][index].bool()
        response = rows.batch["responses"][index]
        assert response[mask].tolist() == client.answer * 2
        assert rows.batch["rm_scores"][index].sum() == 0.5
        logprobs = rows.batch["rollout_log_probs"][index][mask]
        assert (logprobs < 0).all()
    prompts = [ids for _, ids, _ in client.calls]
    first = [i for i in rows.batch["prompts"][0].tolist() if i != _padding(worker)]
    assert first in prompts, "verl must train on the ids that its server received"
    assert list(rows.non_tensor_batch["branches_left_out"]) == [0, 1]
    assert list(rows.non_tensor_batch["min_global_steps"]) == [7, 7]
    assert all(params["temperature"] == 0.7 for _, _, params in client.calls)


async def test_worker_has_one_proxy_and_a_session_one_server(
    model: Path, client: ScriptedClient, tmp_path: Path
) -> None:
    worker = AgentLoopWorker(verl_config(model, settings(tmp_path)), client)
    await worker.generate_sequences(batch("One?", "Two?"))
    await worker.generate_sequences(batch("Three?"))
    sessions = [session for session, _, _ in client.calls]
    assert len(sessions) == 6
    assert len(set(sessions)) == 3
    assert len(list((tmp_path / "trials").glob("proxy-*.db"))) == 1


async def test_search_rule_makes_the_reward_of_a_trained_row_zero(
    model: Path, client: ScriptedClient, tmp_path: Path
) -> None:
    rule = {"name": "delegates", "query": {"text": "sub-agent"}, "action": "zero_reward"}
    given = {**settings(tmp_path), "rules": [rule]}
    worker = AgentLoopWorker(verl_config(model, given), client)
    rows = await worker.generate_sequences(batch("What is 1 + 2?", "And with a sub-agent?"))
    assert rows.batch["rm_scores"].sum(-1).tolist() == [0.5, 0.0]
    assert rows.batch["response_mask"].sum(-1).tolist() == [2 * len(client.answer)] * 2


async def test_failed_trial_trains_nothing_in_v0(
    model: Path, client: ScriptedClient, tmp_path: Path
) -> None:
    client.log_probs = False
    worker = AgentLoopWorker(verl_config(model, settings(tmp_path)), client)
    rows = await worker.generate_sequences(batch("What is 1 + 2?"))
    assert rows.batch["response_mask"].sum() == 0
    assert rows.batch["rm_scores"].sum() == 0
    assert rows.non_tensor_batch["trial_status"][0] == "failed"


async def test_trial_without_a_session_trains_nothing_in_v0(
    model: Path, client: ScriptedClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*_: Any, **__: Any) -> None:
        raise ProxyClientError("the store is full", 400)

    monkeypatch.setattr(ProxyClient, "create_session", refused)
    worker = AgentLoopWorker(verl_config(model, settings(tmp_path)), client)
    rows = await worker.generate_sequences(batch("What is 1 + 2?"))
    assert rows.batch["response_mask"].sum() == 0


async def test_v1_gets_every_branch_and_trains_each_token_once(
    model: Path, client: ScriptedClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, put = v1_worker(verl_config(model, settings(tmp_path)), client, monkeypatch)

    await run_v1(worker, "And with a sub-agent?")

    (written,) = put
    assert written["keys"] == ["u-1_0_0", "u-1_0_1"]
    trained = sum(int(mask.sum()) for mask in written["fields"]["response_mask"].unbind())
    assert trained == len(client.answer) * 3
    assert [tag["min_global_steps"] for tag in written["tags"]] == [7, 7]
    assert [tag["status"] for tag in written["tags"]] == ["success", "success"]


def test_sampling_of_verl_asks_for_no_alternatives_which_its_servers_do_not_report() -> None:
    """With them, each answer would be one whose record lacks what top-k left."""
    pinned = VerlSampling(temperature=0.7, top_k=5, top_p=0.9).pinned
    assert (pinned["top_k"], pinned["top_p"]) == (5, 0.9)
    assert "alternatives" not in pinned


async def test_v1_drops_a_trial_without_a_reward(
    model: Path, client: ScriptedClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {**settings(tmp_path), "verifier": None}
    worker, put = v1_worker(verl_config(model, given), client, monkeypatch)
    with pytest.raises(AgentLoopError, match="has no reward"):
        await run_v1(worker, "What is 1 + 2?")
    assert put == []


async def test_loop_can_be_registered_by_yaml_with_its_own_settings(
    model: Path, client: ScriptedClient, tmp_path: Path
) -> None:
    loops = tmp_path / "loops.yaml"
    target = "agent_loop.extras.verl.agent_loop.AgenticLoop"
    loops.write_text(
        json.dumps([{"name": "ours", "_target_": target, "settings": settings(tmp_path)}])
    )
    config = verl_config(
        model,
        None,
        **{"agent.agent_loop_config_path": str(loops), "agent.default_agent_loop": "ours"},
    )
    rows = await AgentLoopWorker(config, client).generate_sequences(batch("What is 1 + 2?"))
    assert rows.batch["rm_scores"].sum() == 0.5


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (None, "remote_agent.trials_dir: Field required"),
        ({"trials_dir": "t"}, "no agent: set command.argv"),
        ({"trials_dir": "t", "timeout": 3}, "remote_agent.timeout: Extra inputs"),
    ],
)
async def test_wrong_settings_are_reported_in_one_line(
    model: Path, client: ScriptedClient, given: dict[str, Any] | None, says: str
) -> None:
    worker = AgentLoopWorker(verl_config(model, given), client)
    with pytest.raises(Exception, match=says) as raised:
        await worker.generate_sequences(batch("One?"))
    assert isinstance(raised.value.__cause__ or raised.value, ConfigurationError)


def test_agents_of_a_worker_do_not_reach_ray(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in `agentic-train`, a machine that cannot hold that is refused unless it is accepted."""
    found = RayHere(Path("/tmp/ray"), (Path("/home/me/.ray"),), frozenset({6379}), ())
    monkeypatch.setattr(RayHere, "find", lambda: found)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(landlock, "missing", lambda: None)
    config = verl_loop.VerlConfig.model_validate(settings(tmp_path))
    loop = Recorder(config, None, model).loop(None, VerlSampling())  # type: ignore[arg-type]
    assert loop.private_ports() == {6379}
    assert loop.wall is not None
    assert {"/tmp/ray", "/home/me/.ray"} <= set(loop.wall.hide)
    monkeypatch.setattr(landlock, "missing", lambda: "this kernel has no Landlock")
    strict = verl_loop.VerlConfig.model_validate({**settings(tmp_path), "sandbox": "light"})
    with pytest.raises(ConfigurationError, match="no Landlock"):
        Recorder(strict, None, model)  # type: ignore[arg-type]


def test_row_becomes_a_task_with_the_columns_that_json_can_hold() -> None:
    row = {"index": np.int64(3), "raw_prompt": [{"role": "user", "content": "Hi."}], "x": object()}
    task = task_of(row)
    assert (task.task_id, task.data["prompt"]) == ("3", "Hi.")
    assert json.loads(json.dumps(task.data)) == task.data


@pytest.mark.parametrize(
    ("prompt", "of_task"),
    [([{"role": "user", "content": "Hi."}], "Hi."), ("Say hi.", "Say hi.")],
)
def test_prompt_of_a_task_is_text(prompt: Any, of_task: str) -> None:
    row = {"prompt": prompt, "raw_prompt": [{"role": "user", "content": "Hi."}]}
    assert task_of(row).data["prompt"] == of_task


def v1_worker(
    config: Any, client: ScriptedClient, monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, list[dict[str, Any]]]:
    """v1's worker without its Ray actor, and the list of what it writes to the transfer queue."""
    put: list[dict[str, Any]] = []

    async def batch_put(**written: Any) -> None:
        put.append(written)

    monkeypatch.setattr(agent_loop_tq.tq, "init", lambda: None)
    monkeypatch.setattr(agent_loop_tq.tq, "async_kv_batch_put", batch_put)
    cls = agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class
    return cls(config, client), put


async def run_v1(worker: Any, prompt: str) -> None:
    await worker._run_agent_loop(
        {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0},
        trajectory={"step": 7, "sample_index": 0, "rollout_n": 0, "validate": False},
        agent_name="agentic",
        trace=False,
        session_id=0,
        uid="u-1",
        global_steps=7,
        raw_prompt=[{"role": "user", "content": prompt}],
        instance_id="task/0",
    )


def _padding(worker: AgentLoopWorker) -> int:
    return int(worker.tokenizer.pad_token_id)


@pytest.fixture(autouse=True)
async def _workers_end() -> Any:
    yield
    for recorder in list(AgenticLoop.recorders.values()):
        await recorder.close()
    AgenticLoop.recorders.clear()
