"""What each rank receives from rank 0 in one training step.

Trains GRPO with two optimizer steps on four groups of eight trials of a coding agent (prompts of
4,000 tokens, each shared by a group), on gloo ranks of this machine. The bytes are counted by the
kernel, for the TCP connections of each rank while it waits for a message from rank 0. The digest is
that of the metrics and of the trained weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import struct
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import spawn
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.train.workloads import WORKLOADS, make_groups
from trainer.batch import Batch, build_batch
from trainer.cluster.rank_models import models_of_rank
from trainer.learning.learner import Learner
from trainer.learning.models import follow
from trainer.policy.parallel import Ranks
from trainer.policy.parallelism import Seat
from trainer.ranks_config import RanksConfig

VOCABULARY = 1024
BYTES_RECEIVED = 128
"""Offset of `tcpi_bytes_received`, 8 bytes, in Linux's `struct tcp_info`."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rank_bytes", description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    ranks = parser.parse_args().ranks
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _save_model(folder / "model")
        spawn(_rank, (ranks, folder), nprocs=ranks)
        batch = _batch()
        print(f"{batch.input_tokens:,} input tokens, {batch.num_tokens:,} trained")
        for rank in range(1, ranks):
            received = json.loads((folder / f"{rank}.json").read_text(encoding="utf-8"))
            print(f"rank {rank} received {sum(received):,} bytes in {len(received)} messages")
        print(f"digest {(folder / 'digest').read_text(encoding='utf-8')}")


def _rank(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    config = RanksConfig.model_validate(
        {
            "model": {"path": folder / "model", "max_micro_batch_tokens": 8192},
            "algorithm": {"preset": "grpo", "mini_batches": 2, "prox": "recompute"},
            "trainer": {"ranks": size, "device": "cpu", "run_dir": folder / "run"},
        }
    )
    rendezvous = f"file://{folder / 'store'}"
    models = models_of_rank(config, Seat(rank, size, rendezvous, local_rank=0))
    if rank:
        received = _counted(Ranks)
        follow(models)
        (folder / f"{rank}.json").write_text(json.dumps(received), encoding="utf-8")
        return
    learner, batch = Learner(config, models), _batch()
    metrics = learner.compute_logprobs(batch)
    learner.compute_ref_logprobs(batch)
    metrics |= learner.compute_advantages(batch) | learner.update(batch)
    digest = hashlib.sha256(json.dumps(metrics, sort_keys=True).encode())
    with closing(learner.weights()) as weights:
        for _, tensor in weights:
            digest.update(tensor.numpy().tobytes())
    models.finish()
    (folder / "digest").write_text(digest.hexdigest()[:16], encoding="utf-8")


def _counted(ranks: Any) -> list[int]:
    """A list to which each message that `Ranks.hear` returns adds its bytes."""
    received: list[int] = []
    hear = ranks.hear

    def counted(self: Ranks) -> Any:
        before = _received()
        message = hear(self)
        received.append(_received() - before)
        return message

    ranks.hear = counted
    return received


def _received() -> int:
    """Bytes that this process has received over its open TCP connections."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as open_socket:
                if open_socket.type != socket.SOCK_STREAM or open_socket.family == socket.AF_UNIX:
                    continue
                info = open_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:  # the listing's own descriptor, or a socket that does not listen or connect
            continue
        if len(info) >= BYTES_RECEIVED + 8:
            total += struct.unpack_from("Q", info, BYTES_RECEIVED)[0]
    return total


def _batch() -> Batch:
    """The batch of the step, sampled by the policy's version 1."""
    torch.manual_seed(0)
    workload = replace(WORKLOADS["coding-agent"], groups=4)
    batch = build_batch(make_groups(workload, VOCABULARY))
    batch.versions = torch.ones_like(batch.versions)
    return batch


def _save_model(path: Path) -> None:
    torch.manual_seed(0)
    settings = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=16384,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(settings).save_pretrained(path)


if __name__ == "__main__":
    main()
