"""Verl's PPO trainer trains the quickstart's agent, without a GPU.

Starts `verl.trainer.main_ppo` with verl's own trainer, workers (FSDP2), vLLM server and transfer
queue, and `RemoteAgentLoop` as its agent loop, and prints a Markdown table of the steps.
`docs/notes/verl.md` lists what stops such a run without these settings.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"

SETTINGS = (
    "data.train_batch_size=4",
    "data.max_prompt_length=1024",
    "data.max_response_length=1024",
    "algorithm.adv_estimator=grpo",
    "algorithm.norm_adv_by_std_in_grpo=False",
    f"actor_rollout_ref.model.path={QUICKSTART / 'model'}",
    "actor_rollout_ref.model.external_lib=agent_loop.extras.verl.agent_loop",
    "actor_rollout_ref.actor.strategy=fsdp2",
    # Four updates per step, as in the quickstart. verl counts prompts.
    "actor_rollout_ref.actor.ppo_mini_batch_size=1",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.actor.clip_ratio_high=0.28",
    "actor_rollout_ref.actor.optim.lr=5e-4",
    "actor_rollout_ref.actor.optim.betas=[0.9,0.95]",
    "actor_rollout_ref.actor.optim.weight_decay=0",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=8",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
    "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.agent.default_agent_loop=agentic",
    f"+remote_agent.python.target={QUICKSTART / 'agent.py'}:run",
    f"+remote_agent.grader.target={QUICKSTART / 'verify.py'}:grade",
    "trainer.n_gpus_per_node=1",
    "trainer.resume_mode=disable",
    "trainer.logger=[console,file]",
)
"""What any run with our agent loop sets, here for the quickstart."""

FLOAT32 = "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"
WITHOUT_GPU = (
    "trainer.device=cpu",
    "+ray_kwargs.ray_init.num_gpus=1",
    "actor_rollout_ref.model.use_remove_padding=False",
    "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    f"+actor_rollout_ref.actor.fsdp_config.mixed_precision={FLOAT32}",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
    "actor_rollout_ref.actor.use_torch_compile=False",
    "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.rollout.enforce_eager=True",
    "actor_rollout_ref.rollout.free_cache_engine=False",
    "+actor_rollout_ref.rollout.enable_sleep_mode=False",
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls="
    "benchmarks.verl.vllm_worker.CPUWorkerExtension",
)
"""What a run without a GPU sets besides."""

FEW_CORES = (
    "ray_kwargs.ray_init.num_cpus=16",
    "+ray_kwargs.ray_init.include_dashboard=False",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    "data.dataloader_num_workers=0",
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=16",
)
"""What a machine with two cores needs: each of verl's actors asks Ray for a core."""

ENVIRONMENT = {
    "VERL_USE_EXTERNAL_MODULES": "benchmarks.verl.cpu_platform",
    "VERL_PLATFORM": "cpu",
    # verl lists its FSDP engine for `cuda` and `npu` only.
    "VERL_ENGINE_DEVICE": "cuda",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verl", description=__doc__)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--held-out", type=int, default=64, help="tasks of each evaluation")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "verl")
    parser.add_argument("overrides", nargs="*", help="more settings of verl, like KEY=VALUE")
    arguments = parser.parse_args(argv)
    folder: Path = arguments.out.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    train(folder, arguments.steps, arguments.held_out, arguments.overrides)
    print("\n".join(table(folder / "metrics.jsonl")))
    return 0


def train(folder: Path, steps: int, held_out: int, overrides: list[str]) -> None:
    """Runs the training to its end; its output is in `folder`/verl.log.

    Raises CalledProcessError: verl ended with an error.
    """
    write_rows(QUICKSTART / "train.jsonl", folder / "train.jsonl")
    write_rows(QUICKSTART / "heldout.jsonl", folder / "heldout.jsonl")
    settings = (
        f"data.train_files={folder / 'train.jsonl'}",
        f"data.val_files={folder / 'heldout.jsonl'}",
        f"data.val_max_samples={held_out}",
        f"+remote_agent.trials_dir={folder / 'trials'}",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
        f"trainer.total_training_steps={steps}",
        f"trainer.test_freq={steps}",
        f"hydra.run.dir={folder / 'hydra'}",
    )
    command = [sys.executable, "-m", "verl.trainer.main_ppo"]
    with (folder / "verl.log").open("w", encoding="utf-8") as log:
        subprocess.run(
            [*command, *SETTINGS, *WITHOUT_GPU, *FEW_CORES, *settings, *overrides],
            cwd=ROOT,
            env={
                **os.environ,
                **ENVIRONMENT,
                "PYTHONPATH": str(ROOT),
                "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
                "HF_DATASETS_CACHE": str(folder / "datasets"),
            },
            stdout=log,
            stderr=subprocess.STDOUT,
            check=True,
        )


def write_rows(tasks: Path, rows: Path) -> None:
    """Writes a file of tasks as rows that verl reads."""
    with rows.open("w", encoding="utf-8") as file:
        for index, line in enumerate(tasks.read_text(encoding="utf-8").splitlines()):
            task = json.loads(line)
            row = {
                **task,
                "prompt": [{"role": "user", "content": task["prompt"]}],
                "data_source": "quickstart",
                "instance_id": task["task_id"],
                "extra_info": {"index": index},
            }
            file.write(json.dumps(row) + "\n")


def metrics(path: Path) -> list[dict[str, Any]]:
    """verl's metrics, a dictionary per step."""
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [{"step": line["step"], **line["data"]} for line in lines]


def table(path: Path) -> Iterator[str]:
    """Rows of a Markdown table. `Δp` is the difference between the recorded probability of a token
    and the one that verl's trainer computes for it before the step's update."""
    yield "| step | held-out | reward | max Δp | mean Δp | gradient norm | seconds |"
    yield "|---|---|---|---|---|---|---|"
    for step in metrics(path):
        cells = [
            step.get("val-core/quickstart/reward/mean@1"),
            step.get("critic/score/mean"),
            step.get("training/rollout_probs_diff_max"),
            step.get("training/rollout_probs_diff_mean"),
            step.get("actor/grad_norm"),
            step.get("timing_s/step"),
        ]
        shown = ("" if cell is None else f"{cell:.3g}" for cell in cells)
        yield f"| {step['step']} | {' | '.join(shown)} |"


if __name__ == "__main__":
    raise SystemExit(main())
