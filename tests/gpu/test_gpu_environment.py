"""A vLLM for GPUs, on a machine without one: everything but kernels.

The environment is what `make setup EXTRA=gpu` installs; the driver is a stand-in that reports one
H200 (`driver.py`). What only a card can show is in `benchmarks.gpu`.

These tests import nothing of the product, so that they also judge earlier commits
(docs/notes/gpus.md).
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.needs import skip_or_fail
from tests.trainer.policy.architectures import ARCHITECTURES
from tests.trainer.policy.representatives import chosen, representatives

ENVIRONMENT = Path(".cache/gpu")
PYTHON = ENVIRONMENT / "bin" / "python"
TITLES = [each.title for each in ARCHITECTURES if not each.refused]
MINUTES = 15
TRANSPORTS = ("shm", "gloo", "nccl")

pytestmark = pytest.mark.slow


def asked(program: str, folder: Path, *words: str) -> dict[str, Any]:
    """What a program of this folder has found in the environment for GPUs."""
    if not (ENVIRONMENT / ".ready").is_file():
        skip_or_fail("no environment for GPUs; run python -m benchmarks.install gpu")
    out = folder / f"{program}.json"
    unset = {"CUDA_VISIBLE_DEVICES", "PYTHONPATH", "TRITON_F32_DEFAULT", "VLLM_TARGET_DEVICE"}
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    own = {
        "LD_LIBRARY_PATH": str((ENVIRONMENT / "driver").absolute()),
        "OMP_NUM_THREADS": "1",
        "STUB_CALLS": str(folder / "calls"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "VLLM_CACHE_ROOT": str(folder / "vllm"),
    }
    done = subprocess.run(
        [PYTHON, "-m", f"tests.gpu.{program}", out, *words],
        env=inherited | own,
        capture_output=True,
        text=True,
        timeout=MINUTES * 60,
        check=False,
    )
    # A native crash says at the beginning where it was, an exception at the end.
    said = done.stderr if len(done.stderr) < 8000 else done.stderr[:4000] + done.stderr[-4000:]
    assert done.returncode == 0, done.stdout[-2000:] + said
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.fixture(scope="module")
def decided(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    return asked("decisions", tmp_path_factory.mktemp("decisions"))


def test_an_error_of_the_driver_has_a_text() -> None:
    """Triton copies it wherever a call fails: without one, it copied what was at an address that
    nobody had written."""
    if not (ENVIRONMENT / ".ready").is_file():
        skip_or_fail("no environment for GPUs; run python -m benchmarks.install gpu")
    driver = ctypes.CDLL(str((ENVIRONMENT / "driver/libcuda.so.1").absolute()))
    for name in ("cuGetErrorString", "cuGetErrorName"):
        text = ctypes.c_char_p()
        assert getattr(driver, name)(driver.cuDeviceGet(), ctypes.byref(text)) == 0
        assert text.value


TWICE = """
import collections, importlib.metadata as metadata, json
owners = collections.defaultdict(dict)
for package in metadata.distributions():
    for file in package.files or ():
        if file.hash and file.parts[0] != ".." and len(file.parts) > 1:
            owners[str(file)][package.metadata["Name"]] = file.hash.value
print(json.dumps({file: sorted(of) for file, of in owners.items() if len(set(of.values())) > 1}))
"""


@pytest.mark.long
def test_no_two_packages_write_different_files_to_one_place() -> None:
    """Which of the two is there would be chance, as of `cuda.bindings`, of which two versions were
    installed."""
    if not (ENVIRONMENT / ".ready").is_file():
        skip_or_fail("no environment for GPUs; run python -m benchmarks.install gpu")
    done = subprocess.run([str(PYTHON), "-c", TWICE], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {}


@pytest.fixture(scope="module")
def updated(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, Any]:
    titles = chosen(request.session, "updated", "title")
    return asked("updates", tmp_path_factory.mktemp("updates"), *titles)


def test_vllm_finds_the_card_and_we_choose_its_platform(decided: Mapping[str, Any]) -> None:
    found = decided["platform"]
    names = ("device", "capability", "name", "ours", "agrees")
    assert [found[name] for name in names] == ["cuda", "9.0", "NVIDIA H200", "gpu", "gpu"]


def test_plan_divides_what_is_free_on_the_card(decided: Mapping[str, Any]) -> None:
    """By NVML, because CUDA would need memory of the card to say it."""
    assert decided["gpus"]["found"] == [["NVIDIA H200", 150120431616, 149000000000]]


def test_every_module_that_an_engine_needs_is_installed(decided: Mapping[str, Any]) -> None:
    found = decided["imports"]
    for name in (
        "vllm.models.minimax_m3",
        "trainer.weight_sync.vllm_engine",
        "vllm.v1.attention.backends.triton_attn",  # by our arguments
        "vllm.distributed.weight_transfer.base",  # named by our code
    ):
        assert name in found
    assert {name: why for name, why in found.items() if why} == {}


def test_importing_vllm_does_not_choose_gpus_yet(decided: Mapping[str, Any]) -> None:
    """So that an early server can still be told which are its own."""
    assert decided["driver"] == {"initialised": False, "calls": []}


def test_plug_in_registers_in_a_vllm_for_gpus(decided: Mapping[str, Any]) -> None:
    engines = decided["plugin"]["engines"]
    assert engines["shm"] == "SharedMemoryEngine"
    assert engines["gloo"] == "GlooEngine"
    assert decided["plugin"]["reports types"]


OF_CPUS = {"TORCH_COMPILE_DISABLE", "VLLM_CPU_KVCACHE_SPACE", "VLLM_ENABLE_V1_MULTIPROCESSING"}
EXACT = {"NVIDIA_TF32_OVERRIDE", "TRITON_F32_DEFAULT", "VLLM_FLOAT32_MATMUL_PRECISION"}


def test_process_of_a_server_gets_the_variables_of_its_platform(
    decided: Mapping[str, Any],
) -> None:
    """Where it begins, whatever decides them."""
    found = decided["environment"]
    for dtype, wanted in (("float32", EXACT), ("bfloat16", set())):
        assert found[dtype].keys() & (OF_CPUS | EXACT) == wanted


@pytest.mark.parametrize("title", TITLES)
def test_engines_run_compiled_with_cuda_graphs(decided: Mapping[str, Any], title: str) -> None:
    found = decided["architectures"][title]
    assert "error" not in found
    assert found["eager"] is False
    assert found["compiles"] == "VLLM_COMPILE"
    assert "FULL" in found["graphs"]
    assert found["type"] == "torch.bfloat16"
    assert found["transfer"] == "shm"


def test_every_setting_of_an_engine_is_understood(decided: Mapping[str, Any]) -> None:
    found = decided["variants"]
    assert {name: each["error"] for name, each in found.items() if "error" in each} == {}
    assert {name for name, each in found.items() if each["sleeps"]} == {"sleep"}
    assert found["cache"]["cache bytes"] == 2 * 2**30
    assert found["adapters"]["adapter type"] == "torch.bfloat16"
    assert found["float32"]["type"] == "torch.float32"
    assert [found[name]["transfer"] for name in ("nccl", "gloo")] == ["nccl", "gloo"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_is_computed_by_the_backend_that_is_printed(
    decided: Mapping[str, Any], dtype: str
) -> None:
    found = {title: each["attention"][dtype] for title, each in decided["architectures"].items()}
    ours = decided["platform"]
    others = {title: name for title, name in found.items() if name != ours["attention"][dtype]}
    latent = others.pop("DeepSeek-V3")
    assert others == {}
    if dtype == "float32":
        assert latent.startswith("ValueError: No valid attention backend found")
        assert "float32" not in ours["latent"]  # so `--check` refuses it
    else:
        assert latent.endswith("MLA")


def test_float32_is_multiplied_exactly(decided: Mapping[str, Any]) -> None:
    found = decided["precision"]
    assert found["usual tf32"]  # or this test would prove nothing
    assert not found["ours tf32"]
    assert len(found["dots of attention"]) >= 3
    assert not [each for each in found["dots of attention"] if "input_precision" in each]
    assert found["products"] == "highest"


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("title", representatives(TITLES))
def test_update_leaves_each_tensor_in_its_place_with_what_a_fresh_load_gives(
    updated: Mapping[str, Any], title: str, transport: str
) -> None:
    found = updated[title]
    assert "error" not in found
    assert found[transport] == {"wrong": []}
