"""The cause of a server's end is found in its log.

The logs of `logs/real` were written by vLLM on a CPU; the others follow what issues of vLLM quote
of GPUs and of several processes. Each begins with vLLM's warning that names "Too many open files".
"""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.engines.vllm_log import MESSAGE_CHARS, cause_of_end

LOGS = Path(__file__).parent / "logs"
CAUSES = {
    "coloured_and_a_plugin_that_fails": "ValueError: Model architectures ['NoSuch'] are not supp",
    "context_too_long": (
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig Value "
        "error, User-specified max_model_len (99999) is greater than"
    ),
    "core_killed_by_the_kernel": (
        "its process EngineCore was ended by SIGKILL, probably because the machine's memory was"
    ),
    "core_segfault": "!!!!!!! Segfault encountered !!!!!!!",
    "destructor_and_warning": "RuntimeError: CUDA driver initialization failed, you might not",
    "empty": "its log is empty",
    "gpu_adapter_in_float32": (
        "AssertionError at lora_shrink_op.py:281: assert inputs.dtype in [torch.float16, "
        "torch.bfloat16]"
    ),
    "gpu_bad_request_before": "torch.AcceleratorError: CUDA error: device-side assert triggered",
    "gpu_cache_too_small": "ValueError: To serve at least one request with the model's max seq len",
    "gpu_illegal_access": "torch.AcceleratorError: CUDA error: an illegal memory access was",
    "gpu_memory_taken": "ValueError: Free memory on device cuda:0 (136.71/139.81 GiB) on startup",
    "gpu_nccl": "RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for",
    "gpu_no_compiler": (
        "torch._inductor.exc.InductorError: FileNotFoundError: [Errno 2] No such file or directory:"
    ),
    "gpu_noexec": "ImportError: /tmp/.triton/cache/6KQ/cuda_utils.so: failed to map segment from",
    "gpu_old_driver": "RuntimeError: The NVIDIA driver on your system is too old (found version",
    "gpu_out_of_memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB.",
    "gpu_torchvision_missing": "ModuleNotFoundError: No module named 'torchvision'",
    "group": "PermissionError: [Errno 13] Permission denied: '/dev/shm/x'",
    "no_gpu": "vLLM 0.32.0 is a build for GPUs and finds no GPU that it can use; check nvidia-smi",
    "only_starting": "Resolved architecture: Qwen3ForCausalLM",
    "real/assertion": "AssertionError at <string>:4",
    "real/bad_argument": "api_server.py: error: unrecognized arguments: --no-such-flag",
    "real/bad_value": "api_server.py: error: argument --tensor-parallel-size/-tp: invalid int v",
    "real/cache_too_small": "ValueError: No available memory for the cache blocks. Try increasing",
    "real/context_too_long": (
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig Value "
        "error, User-specified max_model_len (99999999) is greater than the derived max_model_len"
    ),
    "real/core_killed_at_start": (
        "one of its processes ended without an error, as if killed (is the memory full?): "
        "RuntimeError: Engine core initialization failed."
    ),
    "real/core_killed_later": (
        "one of its processes ended without an error, as if killed (is the memory full?): "
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."
    ),
    "real/cut_weights": (
        "safetensors._safetensors_rust.SafetensorError: Error while deserializing header: incompl"
    ),
    "real/other_shapes": "RuntimeError: start (0) + length (768) exceeds dimension size (384).",
    "real/port_taken": "OSError: [Errno 98] Address already in use",
    "real/segfault": "!!!!!!! Segfault encountered !!!!!!!",
    "real/unknown_architecture": (
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig Value "
        "error, Model architectures ['NoSuchForCausalLM'] are not supported for now."
    ),
    "real/wrong_model": (
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig Value "
        "error, Invalid repository ID or local directory specified: '/models/wrong'."
    ),
    "terminate": "terminate called after throwing an instance of 'c10::DistBackendError' what(): ",
    "two_workers_mixed": "RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=IN",
}
"""Log → how its cause begins."""


@pytest.mark.parametrize("name", CAUSES)
def test_cause_of_each_log(name: str) -> None:
    found = cause_of_end((LOGS / f"{name}.log").read_text())
    assert found.startswith(CAUSES[name])
    assert "Too many open files" not in found
    assert len(found) <= MESSAGE_CHARS
    assert "\n" not in found


def test_every_log_has_its_cause() -> None:
    files = {file.relative_to(LOGS).with_suffix("").as_posix() for file in LOGS.rglob("*.log")}
    assert files == CAUSES.keys()


def test_more_files_than_allowed_is_a_cause_if_it_ends_a_process() -> None:
    log = (LOGS / "gpu_nccl.log").read_text()
    error = "OSError: [Errno 24] Too many open files: '/dev/shm/a'"
    real = log.replace("RuntimeError: NCCL error: unhandled system error", error)
    assert cause_of_end(real).startswith(error)


@pytest.mark.parametrize("name", CAUSES)
def test_any_beginning_of_a_log_has_a_cause_of_one_line(name: str) -> None:
    """A server may be killed while it writes."""
    lines = (LOGS / f"{name}.log").read_text().splitlines()
    for number in range(0, len(lines), max(1, len(lines) // 60)):
        found = cause_of_end("\n".join(lines[:number]))
        assert found
        assert "\n" not in found
