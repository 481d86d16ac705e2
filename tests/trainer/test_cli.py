"""Invalid input ends with one line that names the key or file, with an exit code other than 0, and
before anything is started."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import trainer.assembly
import trainer.start
from proxy.engines import vllm_platform
from trainer.cli import main
from trainer.cluster.device_plan import Gpu
from trainer.commands.arguments import COMMANDS


@pytest.fixture
def config(tiny_model: Path, tmp_path: Path) -> Path:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"task_id": "a", "prompt": "say a"}) + "\n")
    path = tmp_path / "config.yaml"
    settings = {
        "model": {"path": str(tiny_model)},
        "data": {"train_files": [str(tasks)]},
        "remote_agent": {"command": {"argv": ["true"]}},
        "trainer": {"run_dir": str(tmp_path / "runs" / "a"), "device": "cpu"},
    }
    path.write_text(yaml.safe_dump(settings))
    return path


def failure(capfd: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = main(argv)
    text = capfd.readouterr().err.strip()
    assert code != 0
    assert text.startswith("agentic-train: ")
    assert "\n" not in text
    return code, text


def test_check_prints_the_resolved_configuration(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", str(config), "--check", "rollout.group_size=3"]) == 0
    printed = yaml.safe_load(capfd.readouterr().out)
    assert printed["rollout"]["group_size"] == 3
    assert printed["optimizer"]["lr"]
    assert not (config.parent / "runs").exists()
    assert main(["--config", str(config), "--check", "--changed", "rollout.group_size=3"]) == 0
    short = yaml.safe_load(capfd.readouterr().out)
    assert short["rollout"]["group_size"] == 3
    assert "optimizer" not in short


@pytest.mark.parametrize(
    ("platform", "words", "expected"),
    [
        (
            vllm_platform.CPU,
            (),
            "on CPU, float32, attention CPU_ATTN, --enforce-eager, AGENTIC_ENGINE_DEVICE=cpu, "
            "VLLM_ENABLE_V1_MULTIPROCESSING=0, TORCH_COMPILE_DISABLE=1, VLLM_CPU_KVCACHE_SPACE=1, "
            "OMP_NUM_THREADS=1, nice 10, start beside the trainer's models, weights by shm, "
            "mean |Δ log p| at most 0.001",
        ),
        (
            vllm_platform.GPU,
            ("rollout.concurrency=8",),
            "on GPU, float32, attention TRITON_ATTN, --kv-cache-memory-bytes 1073741824, "
            "AGENTIC_ENGINE_DEVICE=gpu, TRITON_F32_DEFAULT=ieee, "
            "VLLM_FLOAT32_MATMUL_PRECISION=highest, NVIDIA_TF32_OVERRIDE=0, weights by shm, "
            "mean |Δ log p| at most 0.001",
        ),
        (
            vllm_platform.GPU,
            ("model.compute_dtype=bfloat16", "engine.kv_cache_gib=2", "trainer.deterministic=true"),
            "on GPU, bfloat16, attention FLASH_ATTN, --kv-cache-memory-bytes 2147483648, "
            "AGENTIC_ENGINE_DEVICE=gpu, VLLM_BATCH_INVARIANT=1, weights by shm, "
            "mean |Δ log p| at most 0.06",
        ),
    ],
    ids=["CPU", "GPU", "GPU in bfloat16, deterministic"],
)
def test_check_prints_what_the_platform_decides_for_the_engines(
    config: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    platform: vllm_platform.EnginePlatform,
    words: tuple[str, ...],
    expected: str,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(vllm_platform, "installed", lambda: platform)
    if platform is vllm_platform.GPU:
        words = (*words, "trainer.device=auto", "model.max_micro_batch_tokens=1024")
        gpus = (Gpu("NVIDIA H200", 140 * 2**30),)
        for module in (trainer.assembly, trainer.start):
            monkeypatch.setattr(module, "gpus_here", lambda: gpus)
        gpu = torch.device("cuda", 0)
        monkeypatch.setattr(trainer.cluster.ranks, "device_of", lambda *_: gpu)
    assert main(["--config", str(config), "--check", *words]) == 0
    said = [line for line in capfd.readouterr().out.splitlines() if line.startswith("# engines: ")]
    assert said == [f"# engines: vLLM {vllm_platform.version()} {expected}"]


@pytest.mark.parametrize("gpus", [1, 2])
def test_check_warns_of_little_memory_that_workers_share(
    config: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, gpus: int
) -> None:
    monkeypatch.setattr(vllm_platform, "little_shared_memory", lambda: "/dev/shm has 64 MiB")
    words = f"engine.args=[--tensor-parallel-size={gpus}]"
    assert main(["--config", str(config), "--check", words]) == 0
    assert ("warning: /dev/shm has 64 MiB" in capfd.readouterr().out) is (gpus > 1)


def test_check_refuses_a_judge_that_would_take_the_gpu_of_the_run(
    config: Path, tiny_model: Path, capfd: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    gpus = (Gpu("NVIDIA H200", 140 * 2**30),)
    monkeypatch.setattr(vllm_platform, "installed", lambda: vllm_platform.GPU)
    for module in (trainer.assembly, trainer.start):
        monkeypatch.setattr(module, "gpus_here", lambda: gpus)
    words = ["trainer.device=auto", "model.max_micro_batch_tokens=1024"]
    words.append(f"remote_agent.judge={{model: {tiny_model}}}")
    text = failure(capfd, "--config", str(config), "--check", *words)[1]
    assert "remote_agent.judge.model: its server would take 92% of GPU 0" in text
    words.append("remote_agent.judge.engine.gpu_memory_share=0.3")
    assert main(["--config", str(config), "--check", *words]) == 0
    assert "remote_agent.judge, 30% of the memory" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("advantage=tests.trainer.algorithms.test_probe:misspelt", "has no attribute 'centered'"),
        ("loss=tests.trainer.algorithms.test_probe:without_gradient", "does not require grad"),
    ],
)
def test_check_refuses_a_part_of_ones_own_that_fails(
    config: Path, capfd: pytest.CaptureFixture[str], setting: str, said: str
) -> None:
    code, told = failure(capfd, "--config", str(config), "--check", f"algorithm.{setting}")
    assert code == 2
    assert said in told


def test_check_refuses_a_script_that_the_trial_would_not_find(
    config: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "agent.py").touch()
    monkeypatch.chdir(tmp_path)
    argv = "remote_agent.command.argv=[python, agent.py]"
    code, told = failure(capfd, "--config", str(config), "--check", argv)
    assert code == 2
    assert "write {root}/agent.py" in told


def test_unknown_key_is_refused_with_its_name(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, text = failure(capfd, "--config", str(config), "rollout.size=3")
    assert code == 2
    assert "rollout.size=3" in text


def test_missing_config_option_is_refused_with_a_remedy(capfd: pytest.CaptureFixture[str]) -> None:
    code, text = failure(capfd, "rollout.group_size=3")
    assert code == 2
    assert "--config: missing" in text


def test_unknown_command_is_refused_with_its_name(capfd: pytest.CaptureFixture[str]) -> None:
    said = failure(capfd, "sessions", "list")[1]
    assert "'sessions': not a command" in said
    assert "agentic-proxy sessions list --store RUN" in said


def test_model_path_without_a_checkpoint_is_refused_with_the_path(
    config: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, text = failure(capfd, "--config", str(config), f"model.path={tmp_path}")
    assert code == 2
    assert "model.path" in text
    assert str(tmp_path) in text


def test_broken_line_of_a_task_file_is_refused_with_its_number(
    config: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tasks = tmp_path / "broken.jsonl"
    tasks.write_text('{"task_id": "a"}\n{"task_id": \n')
    code, text = failure(capfd, "--config", str(config), f"data.train_files=[{tasks}]")
    assert code == 2
    assert f"{tasks}:2" in text


def test_missing_task_file_is_refused_with_its_path(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert (
        "none.jsonl" in failure(capfd, "--config", str(config), "data.train_files=[none.jsonl]")[1]
    )


def test_configuration_without_task_files_is_refused_with_the_key_to_set(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = failure(capfd, "--config", str(config), "data.train_files=[]")[1]
    assert "data.train_files: missing" in text


def test_held_out_tasks_that_are_trained_on_are_refused(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tasks = config.parent / "tasks.jsonl"
    text = failure(capfd, "--config", str(config), f"data.val_files=[{tasks}]")[1]
    assert "data.val_files" in text


def test_success_that_no_held_out_task_can_reach_is_refused(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["--check", "trainer.stop_at_success=0.9", "eval.every=4"]
    text = failure(capfd, "--config", str(config), *words)[1]
    assert "trainer.stop_at_success=0.9" in text
    assert "data.val_files" in text
    held_out = config.parent / "held_out.jsonl"
    held_out.write_text(json.dumps({"task_id": "b", "prompt": "say b"}) + "\n")
    assert main(["--config", str(config), *words, f"data.val_files=[{held_out}]"]) == 0


def test_missing_agent_command_is_refused_with_its_name(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, text = failure(
        capfd, "--config", str(config), "remote_agent.command.argv=[no-such-program]"
    )
    assert code == 2
    assert "'no-such-program'" in text


def test_report_of_a_folder_without_a_run_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, text = failure(capfd, "report", str(tmp_path))
    assert code == 2
    assert str(tmp_path) in text


def test_weight_for_a_reward_that_is_not_configured_is_refused(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = failure(capfd, "--config", str(config), "remote_agent.reward_weights={judge: 1}")[1]
    assert "remote_agent.reward_weights" in text


def test_several_reward_sources_are_combined(config: Path) -> None:
    rewards = "remote_agent.verifier={argv: ['true']}", "remote_agent.posted_rewards=true"
    weights = "remote_agent.reward_weights={posted: 0.5}"
    assert main(["--config", str(config), "--check", *rewards, weights]) == 0


def test_port_in_use_is_refused_in_one_line(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code = main(["--config", str(config), f"proxy_server.port={port}"])
    assert code == 2
    line = capfd.readouterr().err.strip().splitlines()[-1]
    assert f"proxy_server.port={port}" in line


def test_missing_device_is_refused_in_one_line(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, text = failure(capfd, "--config", str(config), "trainer.device=cuda:63", "--check")
    assert code == 2
    assert "trainer.device=cuda:63: PyTorch" in text
    assert "use trainer.device=cpu or auto" in text


def test_model_id_of_the_hub_is_refused_with_the_command_that_downloads_it(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, text = failure(capfd, "--config", str(config), "model.path=Qwen/Qwen3-0.6B")
    assert code == 2
    assert "hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B" in text


@pytest.mark.parametrize("text", ["0", "-1", "many"])
@pytest.mark.parametrize(
    "words",
    [
        ["eval", "--out", "x", "--repeats"],
        ["collect", "--out", "x", "--limit"],
    ],
)
def test_count_below_one_is_refused_with_its_option(
    words: list[str], text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        COMMANDS[words[0]].parser(words[0]).parse_args([*words[1:], text])
    assert refused.value.code == 2
    said = f"argument {words[-1]}: {text!r}: give a whole number of at least 1"
    assert said in capfd.readouterr().err


def test_several_wrong_keys_are_refused_in_one_line_each(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", str(config), "lr=1e-6", "rollout.group_size=0"]) == 2
    lines = capfd.readouterr().err.strip().splitlines()
    assert [line.partition("=")[0] for line in lines] == [
        "agentic-train: rollout.group_size",
        "agentic-train: lr",
    ]


KUBERNETES = (
    "remote_agent.command=null",
    "remote_agent.kubernetes={image: agent-1, argv: [agent]}",
    "remote_agent.posted_rewards=true",
)


SPANS = (
    "cluster.backend=ray",
    "cluster.strategy=PACK",
    "cluster.engine_nodes=2",
    "engine.weight_transfer=gloo",
    "engine.args=[-tp, '2']",
)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["trainer.ranks=4", "trainer.weight_copies=3"],
            "trainer.weight_copies=3 does not divide trainer.ranks=4",
        ),
        (["trainer.device=mps"], "trainer.device=mps: not a device"),
        (["trainer.device=cpu:3"], "trainer.device=cpu:3: not a device"),
        (["trainer.device=meta"], "trainer.device=meta: not a device"),
        (
            ["engine.weight_transfer=nccl"],
            "weight_transfer=nccl: vLLM on CPUs receives",
        ),
        (["engine.sleep=true"], "engine.sleep: the engines use no GPU here"),
        (["engine.args=[-dp, '2']"], "--data-parallel-size 2: an engine gets weights only if"),
        (["cluster.address=ray-head:6379"], "cluster.address=ray-head:6379: the run would not use"),
        (
            ["cluster.backend=ray", "cluster.engine_gpus=4", "engine.args=[-tp, '2']"],
            "cluster.engine_gpus=4: an engine uses 2",
        ),
        (
            ["cluster.backend=ray", "cluster.share_gpus=true"],
            "cluster.share_gpus: vLLM takes 0.92 of a GPU",
        ),
        (["cluster.backend=ray", "cluster.engine_gpus=2"], "cluster.engine_gpus=2: an engine uses"),
        (["engine.args=[--nnodes, '2']"], "--nnodes is set by the run; use cluster.engine_nodes"),
        ([*SPANS, "cluster.backend=local"], "engine_nodes=2: a run without Ray starts engines on"),
        ([*SPANS, "engine.args=[-tp, '3']"], "engine_nodes=2 does not divide the 3 workers of"),
        ([*SPANS, "cluster.strategy=STRICT_PACK"], "engine_nodes=2: cluster.strategy=STRICT_PACK"),
        ([*SPANS, "engine.weight_transfer=shm"], "engine.weight_transfer=shm is for one node"),
        (
            ["optimizer.name=adamw_8bit", "trainer.ranks=2"],
            "optimizer.name=adamw_8bit: not supported with trainer.ranks=2; use adamw",
        ),
        (["engine.weight_transfer=ipc"], "ipc was removed, because it never worked; use shm"),
        (["remote_agent.placement=kubernetes"], "remote_agent.kubernetes, remote_agent.ray or"),
        (
            [*KUBERNETES],
            "remote_agent.kubernetes: pods cannot reach the proxy at",
        ),
    ],
)
def test_places_that_cannot_work_are_refused_in_one_line(
    config: Path, capfd: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["--config", str(config), "--check", *words]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert message in line


EIGHT_BITS = "{name: adamw_8bit, offload: true}"


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["optimizer.name=adamw_8bit", "optimizer.offload=true"], "optimizer.offload"),
        (
            [
                "optimizer.name=adamw_8bit",
                "model.weights_dtype=bfloat16",
                "model.compute_dtype=bfloat16",
            ],
            "model.weights_dtype=bfloat16",
        ),
        (
            ["algorithm.preset=ppo", f"algorithm.critic.optimizer={EIGHT_BITS}"],
            "algorithm.critic.optimizer.offload",
        ),
        (
            [
                "model.lora={update: adapter, policy: a}",
                f"trainer.policies={{a: {{optimizer: {EIGHT_BITS}}}}}",
            ],
            "trainer.policies.a.optimizer.offload",
        ),
    ],
)
def test_eight_bit_optimizer_with_unsupported_settings_is_refused(
    config: Path, capfd: pytest.CaptureFixture[str], words: list[str], key: str
) -> None:
    assert main(["--config", str(config), "--check", *words]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert f"{key}: not supported with " in line
    assert "name=adamw_8bit; use adamw" in line


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["optimizer.name=adamw_8bit"], "optimizer"),
        (
            ["algorithm.preset=ppo", "algorithm.critic.optimizer={name: adamw_8bit}"],
            "algorithm.critic.optimizer",
        ),
    ],
)
def test_missing_package_of_the_eight_bit_optimizer_is_found_by_check(
    config: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    key: str,
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    assert main(["--config", str(config), "--check", *words]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert f"{key}.name=adamw_8bit needs the package bitsandbytes; install it" in line


@pytest.mark.parametrize("words", [["--check"], []], ids=["check", "start"])
def test_another_version_of_vllm_is_refused_before_anything_starts(
    config: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
) -> None:
    real = metadata.version
    monkeypatch.setattr(
        metadata, "version", lambda name: "0.33.0" if name.startswith("vllm") else real(name)
    )
    assert main(["--config", str(config), *words]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "vllm 0.33.0 is installed" in line
    assert "pip install vllm==0.32.0" in line
    assert not (config.parent / "runs").exists()


def test_check_warns_about_held_out_tasks_that_are_trained_on(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    held_out = config.parent / "val.jsonl"
    held_out.write_text(
        '{"id": "copy", "prompt": "say a"}\n{"prompt": "say b"}\n{"id": 3, "prompt": "say A"}\n'
    )
    assert main(["--config", str(config), "--check", f"data.val_files=[{held_out}]"]) == 0
    said = [line for line in capfd.readouterr().out.splitlines() if "warning: data" in line]
    assert said == [
        "# warning: data: 1 of 3 held-out tasks are also tasks to train on (the first is 'copy' of "
        "'val'), so that an evaluation counts what was trained; remove them from one of both"
    ]
    assert main(["--config", str(config), "--check"]) == 0
    assert "warning: data" not in capfd.readouterr().out


def test_check_refuses_a_quantised_checkpoint_by_its_method(
    config: Path, tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    file = folder / "config.json"
    quantised = {"quantization_config": {"quant_method": "mxfp4"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | quantised))
    text = failure(capfd, "--config", str(config), "--check", f"model.path={folder}")[1]
    assert f"model.path: {folder} is quantised (quantization_config: mxfp4)" in text


def test_check_loads_no_weights(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", load)
    assert main(["--config", str(config), "--check"]) == 0


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)], ids=" ".join
)
def test_help_and_version_import_neither_torch_nor_the_trainer(words: list[str]) -> None:
    assert "agentic-" in said_without_slow_imports("trainer.cli", words)


@pytest.mark.parametrize("words", [["--help"], ["watch", "--help"], ["--version"]], ids=" ".join)
def test_help_of_the_swarms_command_imports_no_slow_module(words: list[str]) -> None:
    assert said_without_slow_imports("agent_loop.extras.swarm.cli", words)


@pytest.mark.parametrize("words", [["--help"], ["--version"]], ids=" ".join)
def test_help_of_harbor_server_imports_no_slow_module(words: list[str]) -> None:
    assert said_without_slow_imports("harbor_sdk.server.cli", words)


def said_without_slow_imports(module: str, words: list[str]) -> str:
    program = f"""
import sys
from {module} import main
try:
    main({words!r})
except SystemExit:
    heavy = {{"torch", "numpy", "pydantic", "aiohttp", "transformers"}} & set(sys.modules)
    assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
