"""Memory and time of ranks that share micro-batches.

For each number of ranks, trains a random Qwen3 on one sequence, of which each rank computes a part,
and prints what the forward and backward pass add to the memory of the process that needs most, and
the time. The log-probabilities are compared with those of one rank. With `--device cuda`, each rank
needs a GPU; the memory is then that of PyTorch's allocator.
"""

from __future__ import annotations

import argparse
import ctypes
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from transformers import AutoModelForCausalLM, Qwen3Config

from agent_loop.records import Group, Rollout, RolloutStatus, Segment, Task
from trainer.algorithms.token_loss import TokenLoss
from trainer.batch import Batch, build_batch
from trainer.optimizer_config import OptimizerConfig
from trainer.policy.model_config import ModelConfig
from trainer.policy.parallel import Ranks
from trainer.policy.parallelism import Parallelism, Seat
from trainer.policy.policy import Policy

VOCABULARY = 1024
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.context_parallel", description=__doc__
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    print("| ranks | added memory, MiB | of one rank | seconds | Δ log p |\n|---|---|---|---|---|")
    first: list[tuple[float, Tensor]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _save_model(folder / "model", args)
        for size in args.ranks:
            spawn(_rank, (size, folder, args), nprocs=size)
            found = [torch.load(folder / f"{size}-{rank}.pt") for rank in range(size)]
            added = max(each["added"] for each in found)
            seconds = max(each["seconds"] for each in found)
            first = first or [(added, found[0]["logprobs"])]
            share, difference = added / first[0][0], found[0]["logprobs"] - first[0][1]
            print(
                f"| {size} | {added / MIB:.0f} | {share:.2f} | {seconds:.1f} "
                f"| {float(difference.abs().max()):.1e} |",
                flush=True,
            )


def _rank(rank: int, size: int, folder: Path, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    device = torch.device(args.device, rank) if args.device == "cuda" else torch.device("cpu")
    seat = Seat(rank, size, f"file://{folder / f'store-{size}'}", local_rank=rank)
    ranks = Ranks.join(seat, device, Parallelism(context=size))
    config = ModelConfig(
        path=folder / "model",
        max_micro_batch_tokens=args.tokens,
        gradient_checkpointing=args.checkpointing,
        compute_dtype="bfloat16" if args.device == "cuda" else "float32",
    )
    policy = Policy(config, OptimizerConfig(lr=1e-6), device=device, ranks=ranks)
    batch = _batch(args.tokens)
    part = policy.parts(batch)[rank].batch
    _train(policy, part)  # allocates gradients and the optimizer's state
    before = _memory(device, reset=True)
    started = time.perf_counter()
    _train(policy, part)
    seconds = time.perf_counter() - started
    added = _memory(device) - before
    logprobs = policy.compute_logprobs(part, temperature=1.0).logprobs
    found = {"added": added, "seconds": seconds, "logprobs": logprobs}
    torch.save(found, folder / f"{size}-{rank}.pt")
    ranks.leave()


def _train(policy: Policy, batch: Batch) -> None:
    def loss(logprobs: Tensor, _entropy: Tensor, _targets: Tensor) -> TokenLoss:
        return TokenLoss(-logprobs / len(logprobs), {})

    for micro in policy.pack(batch):
        policy.forward_backward(micro, batch, loss, temperature=1.0)
    policy.step()


def _memory(device: torch.device, *, reset: bool = False) -> int:
    """The peak in bytes since the last reset; with `reset`, what is in use now."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        if not reset:
            return torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    if reset:
        ctypes.CDLL(None).malloc_trim(0)  # else the pass would use memory that was freed before
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # VmHWM becomes VmRSS
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def _batch(tokens: int) -> Batch:
    """One sequence, of which every token but the first is trained."""
    ids = np.random.default_rng(0).integers(1, VOCABULARY, tokens).astype(np.int32)
    none = np.zeros(tokens, np.int32)
    segment = Segment(-1, ids, np.arange(tokens) > 0, none.astype(np.float32), none, none)
    task = Task("long", {})
    rollout = Rollout("long", task, RolloutStatus.DONE, 0.0, segments=(segment,))
    return build_batch([Group("long", task, [rollout])])


def _save_model(path: Path, args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    settings = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=max(1, args.heads // 4),
        head_dim=args.hidden // args.heads,
        max_position_embeddings=args.tokens,
    )
    AutoModelForCausalLM.from_config(settings).save_pretrained(path)


if __name__ == "__main__":
    main()
