"""How stale tokens may be for each correction: the training step as it is, on a task of seconds.

    python -m benchmarks.staleness                              every correction, 0 to 8 updates
    python -m benchmarks.staleness --corrections none "clip, mask" --staleness 8 --seeds 0

A small model answers each of four symbols with the one that follows it in the alphabet, and its
warm-up has taught it to be wrong in a quarter of them. Step t trains on answers that were sampled
with the weights after step t - staleness (the first ones with those of the beginning); the reward
is 1 if all four are right. Sampling is torch's, so that staleness is exactly what it should be;
everything after the record is the trainer's own. The table shows the success of the last weights,
each symbol sampled. A run that is in `results.jsonl` is not made again.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from agent_loop.records import Group, Rollout, RolloutStatus, Task
from agent_loop.trajectory import build_segments
from examples.starter_model.checkpoint import Shape, new_model, save_model
from proxy.records import FinishReason, Turn, TurnStatus, VersionSpan
from proxy.run_files.files import read_jsonl
from trainer.batch import trained_batch
from trainer.cluster.rank_models import models_of_rank
from trainer.config import TrainerConfig
from trainer.learning.learner import Learner

SYMBOLS, LENGTH, FIRST = 16, 4, 4
"""Tokens FIRST to FIRST + SYMBOLS are the alphabet; 2 asks for the answer."""
ASK = 2
GROUPS, SIZE = 16, 8
EVALUATED = 512
RIGHT = 0.75
"""Of the symbols of the warm-up's answers."""
WARM_UP_STEPS = 500
LR = 2e-3
"""With twice as much, a run without a clip fell back to 0 even without staleness; with half, two
corrections were at 0.95 and 0.96 after 8 updates (one seed)."""
PPO = {"loss": {"name": "ppo", "clip_low": 0.2, "clip_high": 0.28}}
CORRECTIONS: Mapping[str, Mapping[str, Any]] = {
    "none": {"loss": "reinforce", "correction": {"weight": None}},
    "clip around what sampled": PPO | {"prox": "behaviour", "correction": {"weight": None}},
    "clip, no weight": PPO | {"correction": {"weight": None}},
    "clip, truncate": PPO | {"correction": {"weight": "truncate"}},
    "clip, truncate sequence": PPO
    | {"correction": {"weight": {"name": "truncate", "level": "sequence"}}},
    "clip, mask": PPO | {"correction": {"weight": {"name": "mask", "lower": 0.5, "upper": 2.0}}},
    "clip, truncate, veto": PPO | {"correction": {"weight": "truncate", "reject": ["veto"]}},
    "clip, truncate, divergence": PPO
    | {"correction": {"weight": "truncate", "reject": [{"name": "divergence", "upper": 0.1}]}},
    "clip, binary divergence": PPO
    | {"correction": {"weight": None, "reject": [{"name": "binary_divergence", "upper": 0.05}]}},
    "clip, second moment": PPO | {"correction": {"weight": None, "reject": ["second_moment"]}},
}
"""Settings of `algorithm`. Those that name no `prox` compute π_prox by a forward pass."""
Key = tuple[str, int, int, int]
"""Correction, staleness, seed, steps."""


def answers(prompts: Tensor) -> Tensor:
    """The right ones. `[N, LENGTH]` → `[N, LENGTH]`."""
    return (prompts - FIRST + 1) % SYMBOLS + FIRST


def asked(prompts: Tensor) -> Tensor:
    """With the token that asks for the answer."""
    return torch.cat([prompts, torch.full((len(prompts), 1), ASK)], 1)


def drawn(count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(FIRST, FIRST + SYMBOLS, (count, LENGTH), generator=generator)


def warmed_up(folder: Path) -> Path:
    """The model that each run begins with. Made once."""
    if (folder / "config.json").exists():
        return folder
    shape = Shape(vocab_size=FIRST + SYMBOLS, hidden_size=64, layers=2, heads=4, context_tokens=16)
    model, generator = new_model(shape, seed=0), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for _ in range(WARM_UP_STEPS):
        prompts = drawn(256, generator)
        right = torch.rand(prompts.shape, generator=generator) < RIGHT
        said = torch.where(right, answers(prompts), drawn(256, generator))
        ids = torch.cat([asked(prompts), said], 1)
        logits = model(ids[:, :-1]).logits[:, LENGTH:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), said.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    save_model(model, folder, end_of_turn=0, padding=1)
    return folder


@torch.no_grad()
def sampled(model: Any, prompts: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Answers `[N, LENGTH]` and their log-probabilities."""
    ids, logprobs = asked(prompts), []
    for _ in range(LENGTH):
        scores = torch.log_softmax(model(ids).logits[:, -1].float(), -1)
        chosen = torch.multinomial(scores.exp(), 1, generator=generator)
        logprobs.append(scores.gather(1, chosen))
        ids = torch.cat([ids, chosen], 1)
    return ids[:, LENGTH + 1 :], torch.cat(logprobs, 1)


def groups_of(model: Any, step: int, version: int, generator: torch.Generator) -> list[Group]:
    """A step's trials, each recorded as a session of one turn."""
    prompts = drawn(GROUPS, generator).repeat_interleave(SIZE, 0)
    said, logprobs = sampled(model, prompts, generator)
    rewards = (said == answers(prompts)).all(1).double().tolist()
    ids = asked(prompts).numpy().astype(np.int32)
    groups = []
    for number in range(GROUPS):
        task, rollouts = Task(f"{step}-{number}", {}), []
        for at in range(number * SIZE, (number + 1) * SIZE):
            turn = Turn(
                session_id=f"{step}-{at}",
                index=0,
                parent=None,
                shared_tokens=0,
                fork_cause=None,
                prompt_ids=ids[at],
                request_key=b"",
                sampling={},
                sampled_ids=said[at].numpy().astype(np.int32),
                logprobs=logprobs[at].numpy().astype(np.float32),
                versions=(VersionSpan(version, 0, LENGTH),),
                finish_reason=FinishReason.STOP,
                status=TurnStatus.DONE,
            )
            segments = build_segments([turn])
            rollouts.append(
                Rollout(
                    *(turn.session_id, task, RolloutStatus.DONE, rewards[at], segments),
                    num_turns=1,
                )
            )
        groups.append(Group(f"{step}-{number}", task, tuple(rollouts)))
    return groups


def success(model: Any, seed: int) -> float:
    """Of answers to prompts that no run trains on."""
    generator = torch.Generator().manual_seed(seed + 1_000_000)
    prompts = drawn(EVALUATED, generator)
    said, _ = sampled(model, prompts, generator)
    return float((said == answers(prompts)).all(1).double().mean())


def train(model: Path, correction: str, staleness: int, seed: int, steps: int) -> list[float]:
    """The success before the first step, and after each fifth."""
    settings = {
        "model": {"path": model},
        "remote_agent": {"command": {"argv": ["true"]}},
        "engine": {"verify": False},
        "optimizer": {"lr": LR, "betas": [0.9, 0.95], "warmup_steps": 2, "schedule": "linear"},
        "algorithm": {
            "advantage": "dr_grpo",
            "aggregation": "token_mean",
            "mini_batches": 4,
            "groups": "with_signal",
            **CORRECTIONS[correction],
        },
        "trainer": {"steps": steps, "device": "cpu", "seed": seed},
    }
    config = TrainerConfig.model_validate(settings)
    learner = Learner(config, models_of_rank(config))
    policy = learner.models.policy.model
    sampler = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    past: deque[tuple[int, Mapping[str, Tensor]]] = deque(maxlen=staleness + 1)
    curve = [success(sampler, seed)]
    for step in range(1, steps + 1):
        weights = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
        past.append((learner.version, weights))
        version, old = past[0]
        sampler.load_state_dict(old)
        batch = trained_batch(groups_of(sampler, step, version, generator))
        learner.compute_logprobs(batch)
        learner.compute_advantages(batch)
        learner.update(batch)
        if step % 5 == 0:
            sampler.load_state_dict(policy.state_dict())
            curve.append(success(sampler, seed))
    return curve


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the runs that are missing, and prints the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.staleness",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = list(CORRECTIONS)
    parser.add_argument("--corrections", nargs="+", choices=known, default=known, metavar="NAME")
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 1, 2, 4, 8])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("runs/staleness"))
    given = parser.parse_args(argv)
    logging.disable(logging.WARNING)  # of settings that mean nothing without agents
    torch.set_num_threads(1)
    model, results = warmed_up(given.out / "model"), given.out / "results.jsonl"
    curves = read(results)
    for seed in given.seeds:
        for staleness in given.staleness:
            for correction in given.corrections:
                key = (correction, staleness, seed, given.steps)
                if key in curves:
                    continue
                began = time.monotonic()
                curves[key] = train(model, *key)
                line = dict(zip(("correction", "staleness", "seed", "steps"), key, strict=True))
                with results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({**line, "success": curves[key]}) + "\n")
                took_s = time.monotonic() - began
                end = curves[key][-1]
                print(f"{correction}, {staleness}, seed {seed}: {end:.2f} ({took_s:.0f} s)")
    print("\n".join(table(curves, given)))
    return 0


def read(results: Path) -> dict[Key, list[float]]:
    """The curves of the runs that were made."""
    curves: dict[Key, list[float]] = {}
    for made in read_jsonl(results):
        key = (made["correction"], made["staleness"], made["seed"], made["steps"])
        curves[key] = made["success"]
    return curves


def table(curves: Mapping[Key, list[float]], given: argparse.Namespace) -> list[str]:
    """Mean and range of the success after the last step, over the seeds."""
    lines = [
        f"| | {' | '.join(map(str, given.staleness))} |",
        f"|---{'|---' * len(given.staleness)}|",
    ]
    for correction in given.corrections:
        cells = []
        for staleness in given.staleness:
            keys = ((correction, staleness, seed, given.steps) for seed in given.seeds)
            ends = [curves[key][-1] for key in keys]
            cells.append(f"{np.mean(ends):.2f} ({min(ends):.2f} to {max(ends):.2f})")
        lines.append(f"| {correction} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
