"""Weights published as files, in full and as deltas.

    python -m benchmarks.published_weights --layers 12 --lr 1e-6 1e-5

Trains a Qwen 3 of random weights in float32 by AdamW on random tokens, publishes each version in
bfloat16, and pulls it, both in a folder on this machine. The first steps, in which AdamW has no
moments and moves every weight by the learning rate, are not published. With `--scale`, the weights
are multiplied first, because a trained model's are larger than those of a new one. The figures are
the medians of `--versions`: the share of elements that changed, sizes, and seconds of wall time.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from proxy.extras.relay.weights.pull import WeightStore
from trainer.extras.relay.published_weights import Publisher, described
from trainer.weight_sync.dtypes import rounded
from trainer.weight_sync.segment import Named

WARM_STEPS = 10
TOKENS = 256


class Trained:
    """A model that is trained on random tokens."""

    def __init__(self, layers: int, lr: float, scale: float) -> None:
        config = Qwen3Config(
            vocab_size=32_000,
            hidden_size=768,
            intermediate_size=2304,
            num_hidden_layers=layers,
            num_attention_heads=12,
            num_key_value_heads=4,
            head_dim=64,
            tie_word_embeddings=True,
        )
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter *= scale
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=0.0)
        self._generator = torch.Generator().manual_seed(1)

    def step(self) -> None:
        vocabulary = self.model.config.vocab_size
        ids = torch.randint(vocabulary, (1, TOKENS), generator=self._generator)
        self.model(input_ids=ids, labels=ids).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def weights(self) -> Iterator[Named]:
        yield from ((name, each.detach()) for name, each in self.model.named_parameters())


def measure(trained: Trained, versions: int, folder: Path) -> None:
    """Prints a row for the full version, and one for the deltas after it."""
    for _ in range(WARM_STEPS):
        trained.step()
    shapes = [(name, each.to("meta")) for name, each in trained.weights()]
    narrow = dict.fromkeys(dict(shapes), torch.bfloat16)
    tensors = described(shapes, list(rounded(shapes, narrow)))
    publisher = Publisher(f"file://{folder}/published", "run", folder, full_every=versions + 2)
    worker = WeightStore(f"file://{folder}/published", folder / "worker")
    rows = []
    before: dict[str, torch.Tensor] = {}
    for version in range(versions + 1):
        now = dict(rounded(trained.weights(), narrow))
        changed = sum(int((now[name] != before[name]).sum()) for name in before)
        count = sum(each.numel() for each in now.values())
        began = time.perf_counter()
        sent = publisher.publish(rounded(trained.weights(), narrow), tensors, version)
        published_s = time.perf_counter() - began
        began = time.perf_counter()
        pulled = worker.pull(sent.name, lambda: False)
        pulled_s = time.perf_counter() - began
        rows.append((changed / count, pulled.pulled_bytes, published_s, pulled_s))
        before = {name: each.clone() for name, each in now.items()}
        trained.step()
    publisher.close()
    full, *deltas = rows
    whole = full[1]
    for kind, (share, size, published_s, pulled_s) in (
        ("full", full),
        ("delta", tuple(median(column) for column in zip(*deltas, strict=True))),
    ):
        print(
            f"| {kind} | {'' if kind == 'full' else f'{share:.1%}'} | {size / 1e6:.1f} MB | "
            f"{size / whole:.1%} | {published_s:.1f} s | {pulled_s:.1f} s |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.published_weights", description=__doc__
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 1e-5])
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--versions", type=int, default=5)
    given = parser.parse_args()
    for lr in given.lr:
        trained = Trained(given.layers, lr, given.scale)
        count = sum(each.numel() for each in trained.model.parameters())
        print(f"learning rate {lr:g}, {count / 1e6:.0f} M weights")
        print(
            "| version | changed | pulled | of full | publish | pull |\n|---|---|---|---|---|---|"
        )
        with tempfile.TemporaryDirectory() as folder:
            measure(trained, given.versions, Path(folder))


if __name__ == "__main__":
    main()
