"""The parts of `benchmarks.gpu`: training runs whose record is read, and other benchmarks.

The first table needs one GPU and, where parts run beside each other, at most 8 minutes: the sum of
the limits of what runs after each other. On an H200 with 16 cores, an engine of 0.7 M weights took
60 to 90 s to start (imports, compilation, CUDA graphs), one of 1.4 B weights 85 s. In a rehearsal,
every part runs on a CPU, with tiny sizes, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TRAIN = (".venv/bin/agentic-train", "--config", "agentic_trainer.yaml")
BRIEF = ("data.val_files=[]", "trainer.steps=4", "trainer.save_every=0")
REHEARSED = ("data.val_files=[]", "trainer.steps=2", "trainer.device=cpu")
RECIPE = "examples/recipes/train.sh"
RECIPES = [
    (model, agent)
    for model in ("qwen3-8b", "qwen3.5-4b")
    for agent in ("claude-code", "codex", "mini-swe-agent")
]
BFLOAT16 = "model.compute_dtype=bfloat16"
WIDE_MODEL = "benchmarks.gpu.wide_model"


@dataclass(frozen=True, slots=True)
class Part:
    """`{folder}` in its words is the part's folder.

    Example: Part("sleep", 1, ("engine.sleep=true",), limit_s=65)
    """

    name: str
    gpus: int
    """Number of GPUs that it needs at least; a rehearsal needs none."""
    settings: Sequence[str] = ()
    """Of a training run."""
    rehearsed: Sequence[str] = ()
    """Settings of the rehearsal, in addition; they replace what a CPU cannot do."""
    program: Sequence[str] = TRAIN
    """The training run's command."""
    before: Sequence[str] = ()
    """A module and its arguments, run first; not in a rehearsal."""
    limit_s: float = 600.0
    """How long it may take on a GPU."""
    beside: str = ""
    """Parts in a row with the same word run at the same time if the machine has the cores."""
    module: str = ""
    """A benchmark instead of a training run. It prints tables, and goes on where it was stopped if
    it keeps its rows in `{folder}`."""
    arguments: Sequence[str] = ()
    on_cpu: Sequence[str] = ()
    """The benchmark's arguments in a rehearsal."""

    def words(self, folder: str, *, rehearse: bool) -> list[str]:
        """The arguments of its command."""
        if self.module:
            chosen = [*(self.on_cpu if rehearse else self.arguments)]
        else:
            own = [*self.settings, *((*REHEARSED, *self.rehearsed) if rehearse else ())]
            chosen = [f"trainer.run_dir={folder}/run", *own]
        return [word.replace("{folder}", folder) for word in chosen]


def first_table() -> list[Part]:
    """What one GPU shows first, in this order."""
    return [
        Part("quickstart", 1, limit_s=195),
        Part(
            "sleep",
            1,
            ("engine.sleep=true", *BRIEF),
            ("engine.sleep=false",),
            limit_s=185,
            beside="engines start",
        ),
        Part(
            "weight updates",
            1,
            (
                "model.path={folder}/model",
                "engine.weight_transfer=shm",
                # Random weights solve nothing; these rewards differ, so that there is an update.
                "remote_agent.grader.target=examples/recipes/any_number.py:grade",
                "rollout.max_tokens=64",
                *BRIEF,
            ),
            ("model.path=examples/quickstart/model", "rollout.groups_per_step=1"),
            before=(WIDE_MODEL, "--out", "{folder}/model"),
            limit_s=185,
            beside="engines start",
        ),
        Part(
            "adapter",
            1,
            (BFLOAT16, *BRIEF),
            ("model.compute_dtype=float32",),
            (*TRAIN, "--config", "examples/quickstart/adapter.yaml"),
            limit_s=185,
            beside="engines start",
        ),
        Part(
            "exactness",
            1,
            module="benchmarks.gpu.exactness",
            arguments=("--device", "cuda", "--rows", "{folder}/rows.jsonl"),
            on_cpu=("--device", "cpu", "--rows", "{folder}/rows.jsonl"),
            limit_s=185,
            beside="engines start",
        ),
        Part(
            "training beside TRL",
            1,
            module="benchmarks.train",
            arguments=(
                *("--device", "cuda", "--model", "0.6b", "--dtype", "bfloat16"),
                *("--workloads", "tools", "--steps", "2"),
                *("--contestants", "pieces", "packed", "trl"),
            ),
            on_cpu=("--device", "cpu", "--workloads", "single-turn", "--steps", "1"),
            limit_s=100,
        ),
    ]


def further(count: int) -> list[Part]:
    """What comes after the first table, on this number of GPUs."""
    ranks = [str(number) for number in (1, 2, 4, 8) if number <= max(count, 1)]
    on_two = ("trainer.ranks=2", "trainer.mode=colocated", *BRIEF)
    separate = ("trainer.mode=separate", *BRIEF)
    return [
        Part(
            "card",
            1,
            module="benchmarks.gpu.card",
            arguments=("--device", "cuda", "--rows", "{folder}/rows.jsonl"),
            on_cpu=("--device", "cpu", "--rows", "{folder}/rows.jsonl"),
            limit_s=1200,
        ),
        Part("bfloat16", 1, (BFLOAT16, *BRIEF)),
        Part("separate", 2, separate),
        Part(
            "nccl",
            2,
            ("engine.weight_transfer=nccl", *separate),
            ("engine.weight_transfer=gloo",),
        ),
        Part("gloo", 2, ("engine.weight_transfer=gloo", *separate)),
        Part("two ranks", 2, on_two),
        Part("tensor parallel", 2, (*on_two, "trainer.tensor_parallel=2")),
        Part("context parallel", 2, (*on_two, "trainer.context_parallel=2")),
        Part("two engines", 3, ("engine.replicas=2", *separate)),
        *(_recipe(model, agent) for model, agent in RECIPES),
        _recipe("qwen3-8b", "codex", gpus=8),
        _recipe("qwen3.5-4b", "codex", gpus=8),
        Part(
            "host tier",
            1,
            module="benchmarks.scheduling",
            arguments=(
                *("--layers", "28", "--hidden", "2048", "--agents", "100", "--turns", "20"),
                *("--pause-s", "1", "--cache-mib", "1600", "--host-gib", "8"),
            ),
            on_cpu=("--agents", "4", "--turns", "4", "--cache-mib", "8", "--host-gib", "0.25"),
        ),
        Part(
            "memory of shared micro-batches",
            1,
            module="benchmarks.context_parallel",
            arguments=("--device", "cuda", "--ranks", *ranks),
            on_cpu=("--tokens", "512", "--ranks", "1", "2"),
        ),
    ]


def _recipe(model: str, agent: str, gpus: int = 1) -> Part:
    """A recipe with fewer trials than it has: 16 a step, and 4 in a rehearsal, on a tiny model."""
    few = ("rollout.groups_per_step=4", "rollout.group_size=4", "data.harbor.val_dir=[]")
    fewer = ("--tiny", "rollout.groups_per_step=2", "rollout.group_size=2")
    return Part(
        f"{model} {agent}{', eight GPUs' if gpus > 1 else ''}",
        gpus,
        (*(("--eight-gpus",) if gpus > 1 else ()), *few, "trainer.steps=4"),
        fewer,
        (RECIPE, model, agent),
        limit_s=7200,
    )
