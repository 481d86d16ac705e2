"""What differs between a vLLM on a CPU and one on GPUs; the environments themselves are asked in
`tests/gpu` and here."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest

from proxy.engines import vllm_platform
from proxy.engines.vllm_platform import CPU, GPU, EnginePlatform
from proxy.engines.vllm_server import VllmConfig, asked_environment, server_arguments
from proxy.errors import ConfigurationError

HALF = str(max(1, len(os.sched_getaffinity(0)) // 2))
ROWS = {
    "device": ("cpu", "gpu"),
    "arguments": (["--enforce-eager"], []),
    "arguments with a cache of 3 GiB": (
        ["--enforce-eager"],
        ["--kv-cache-memory-bytes", "3221225472"],
    ),
    "environment": (
        {
            "AGENTIC_ENGINE_DEVICE": "cpu",
            "OMP_NUM_THREADS": HALF,
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        },
        {"AGENTIC_ENGINE_DEVICE": "gpu"},
    ),
    "more environment in float32": (
        {},
        {
            "NVIDIA_TF32_OVERRIDE": "0",
            "TRITON_F32_DEFAULT": "ieee",
            "VLLM_FLOAT32_MATMUL_PRECISION": "highest",
        },
    ),
    "more environment with a cache of 3 GiB": ({"VLLM_CPU_KVCACHE_SPACE": "3"}, {}),
    "late": (
        {
            "MKL_CBWR",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
            "VLLM_CPU_ATTN_SPLIT_KV",
            "VLLM_CPU_KVCACHE_SPACE",
        },
        {
            "CUDA_VISIBLE_DEVICES",
            "NVIDIA_TF32_OVERRIDE",
            "TRITON_F32_DEFAULT",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
            "VLLM_FLOAT32_MATMUL_PRECISION",
        },
    ),
    "repeatable": (
        {"MKL_CBWR": "AUTO,STRICT", "VLLM_CPU_ATTN_SPLIT_KV": "0"},
        {"VLLM_BATCH_INVARIANT": "1"},
    ),
    "gives way": (True, False),
    "forks": (True, False),
    "plan": (False, True),
    "transports": (("shm", "gloo"), ("shm", "nccl", "gloo")),
    "types with adapters": (("float32", "bfloat16"), ("bfloat16",)),
    "types with latent attention": (("float32", "bfloat16"), ("bfloat16",)),
    "attention in float32": ("CPU_ATTN", "TRITON_ATTN"),
    "attention in bfloat16": ("CPU_ATTN", "FLASH_ATTN"),
}


def _more(platform: EnginePlatform, dtype: str, gib: int | None) -> dict[str, str]:
    usual = platform.server_environment("bfloat16", None)
    return dict(platform.server_environment(dtype, gib).items() - usual.items())


def _decided(platform: EnginePlatform) -> dict[str, object]:
    return {
        "device": platform.device,
        "arguments": platform.server_arguments(None),
        "arguments with a cache of 3 GiB": platform.server_arguments(3),
        "environment": platform.server_environment("bfloat16", None),
        "more environment in float32": _more(platform, "float32", None),
        "more environment with a cache of 3 GiB": _more(platform, "bfloat16", 3),
        "late": platform.late,
        "repeatable": platform.repeatable,
        "gives way": platform.shares_cores,
        "forks": platform.forks,
        "plan": platform.plans_devices,
        "transports": platform.transports,
        "types with adapters": platform.adapter_dtypes,
        "types with latent attention": platform.latent_dtypes,
        "attention in float32": platform.attention["float32"],
        "attention in bfloat16": platform.attention["bfloat16"],
    }


@pytest.mark.parametrize("row", ROWS)
def test_table_of_both_platforms(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert tuple(_decided(each)[row] for each in (CPU, GPU)) == ROWS[row]


def _distributions(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)


@pytest.mark.parametrize(
    ("versions", "target", "expected"),
    [
        ({"vllm": "0.32.0"}, "", GPU),
        ({"vllm": "0.32.0+cu130"}, "cuda", GPU),
        ({"vllm": "0.32.0+rocm700"}, "", GPU),
        ({"vllm": "0.32.0+cpu"}, "", CPU),
        ({"vllm-cpu": "0.32.0"}, "", CPU),
        ({"vllm": "0.32.0", "vllm-cpu": "0.32.0"}, "", GPU),
        ({"vllm": "0.32.0"}, "CPU", CPU),
    ],
)
def test_platform_is_chosen_by_vllms_own_rule(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], target: str, expected: EnginePlatform
) -> None:
    _distributions(monkeypatch, versions)
    monkeypatch.setenv("VLLM_TARGET_DEVICE", target)
    assert vllm_platform.installed() is expected


def test_no_vllm_is_an_error_that_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _distributions(monkeypatch, {"vllm-tpu": "0.32.0"})
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    with pytest.raises(ConfigurationError, match="make setup"):
        vllm_platform.installed()


@pytest.mark.parametrize("platform", [CPU, GPU])
def test_server_gets_what_its_platform_says_and_the_users_variables_win(
    monkeypatch: pytest.MonkeyPatch, platform: EnginePlatform
) -> None:
    monkeypatch.setattr(vllm_platform, "installed", lambda: platform)
    config = VllmConfig(kv_cache_gib=2, env={"TRITON_F32_DEFAULT": "tf32", "A": "b"})
    given = asked_environment(config, "float32")
    wanted = platform.server_environment("float32", 2) | config.env
    assert given == {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", **wanted}
    argv = server_arguments(config)
    assert ("--enforce-eager" in argv) == (platform is CPU)
    assert ("--kv-cache-memory-bytes" in argv) == (platform is GPU)


class Found:
    """vLLM's `current_platform`."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type

    def is_unspecified(self) -> bool:
        return not self.device_type

    def is_cpu(self) -> bool:
        return self.device_type == "cpu"


@pytest.mark.parametrize(
    ("device", "found", "words"),
    [
        ("gpu", "", "finds no GPU that it can use"),
        (None, "", "finds no GPU that it can use"),
        ("gpu", "cpu", "runs on 'cpu', but was started as one for gpus"),
        ("cpu", "cuda", "runs on 'cuda', but was started as one for cpus"),
    ],
)
def test_server_of_another_platform_ends_and_says_why(
    device: str | None, found: str, words: str
) -> None:
    with pytest.raises(SystemExit, match=words):
        vllm_platform.require(device, Found(found))


@pytest.mark.parametrize(("device", "found"), [("cpu", "cpu"), ("gpu", "cuda"), (None, "cuda")])
def test_server_of_the_wanted_platform_goes_on(device: str | None, found: str) -> None:
    vllm_platform.require(device, Found(found))


@pytest.mark.slow
def test_installed_vllm_finds_the_platform_that_is_chosen_for_it() -> None:
    ask = "from vllm.platforms import current_platform as p; print('device', p.device_type)"
    done = subprocess.run(
        [sys.executable, "-c", ask], capture_output=True, text=True, check=True, timeout=300
    )
    devices = {"cpu": CPU, "cuda": GPU}
    assert devices[done.stdout.split()[-1]] is vllm_platform.installed()


@pytest.mark.parametrize(
    ("name", "found"),
    [("vllm", "0.33.0"), ("vllm", "0.31.0"), ("vllm-cpu", "0.33.1"), ("vllm", "1.0")],
)
def test_other_versions_of_vllm_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, found: str
) -> None:
    _distributions(monkeypatch, {name: found})
    with pytest.raises(ConfigurationError, match=rf"{name} {found} is installed.*{name}==0\.32\.0"):
        vllm_platform.installed()


@pytest.mark.parametrize(("mebibytes", "said"), [(64, "/dev/shm has 64 MiB"), (1024, None)])
def test_little_shared_memory_is_said(
    monkeypatch: pytest.MonkeyPatch, mebibytes: int, said: str | None
) -> None:
    found = SimpleNamespace(f_blocks=mebibytes << 8, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: found)
    text = vllm_platform.little_shared_memory()
    assert text is None if said is None else said in str(text)


def test_a_machine_without_shared_memory_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(path: str) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "statvfs", absent)
    assert vllm_platform.little_shared_memory() is None
