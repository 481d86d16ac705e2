"""Exported rows are read by the real packages whose formats they have.

TRL, verl and Harbor are in environments of the test run. tinker and SkyRL are installed by
`benchmarks.install export-packages` for `make test-long`. prime-rl is not on the package index: its
rows are checked against the fields of its source (`src/prime_rl/transports/rollouts/types.py`).
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import hashlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from agent_loop.extras.other_trainers.skyrl import AgentGenerator
from agent_loop.records import AgentEnd, AgentResult, Graded, Group, Task
from agent_loop.trial.outcome import Attempt, build_rollout
from proxy.conversation.images import mark
from proxy.conversation.messages import Conversation, Message, ToolCall, dump_answer, load_answer
from proxy.conversation.recorded import dump_request
from proxy.extras.export.files import write
from proxy.extras.export.images import as_json
from proxy.extras.export.protocol import Row, Sample
from proxy.extras.export.registry import open_format
from proxy.records import ImageSpan, RecordedImage, Turn
from proxy.records.images import image_ids
from tests.agent_loop.integrations.test_skyrl import (
    TASKS,
    Pixelated,
    looking,
    paths_with_images,
)
from tests.agent_loop.recorded import turn as a_turn
from tests.agent_loop.scripted_loop import ClosableLoop
from tests.e2e.images.program import TORCHVISION
from tests.needs import needs
from tests.proxy.extras.export.trees import a_session
from tests.proxy.extras.view.pictures_of_agents import png
from trainer.algorithms import Algorithm, AlgorithmConfig
from trainer.algorithms.correction import Correction
from trainer.batch import build_batch
from trainer.optimizer_config import OptimizerConfig
from trainer.policy.model_config import ModelConfig
from trainer.policy.policy import Policy

ROOT = Path(__file__).parents[2]
HARBOR = ROOT / ".harbor/bin/python"
PACKAGES = ROOT / ".cache/export-packages/bin/python"
NO_PACKAGES = (
    None
    if PACKAGES.exists()
    else "run python -m benchmarks.install export-packages (tinker, SkyRL)"
)
PICTURE, PICTURE_TOKENS, PAD = png(64, 32), 8, 500
REWARDS = (1.0, 0.0, 0.5, 0.25)
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}
]


def sessions() -> list[Sample]:
    """Four sessions of one task with a tool's result between two answers, of random tokens."""
    random, samples = np.random.default_rng(0), []
    for number, reward in enumerate(REWARDS):
        prompt, first, result, second = (
            random.integers(5, 500, int(random.integers(3, 9))).tolist() for _ in range(4)
        )
        call = Message("assistant", "", None, [ToolCall("call_1", "ls", '{"path": "."}')])
        user, tool = Message("user", "List."), Message("tool", "a.txt", tool_call_id="call_1")
        turns = [
            answered(a_turn(0, None, 0, prompt, first), [user], None, call),
            answered(
                a_turn(1, 0, len(prompt) + len(first), result, second),
                [tool],
                0,
                Message("assistant", f"It is file {number}."),
            ),
        ]
        advantage = reward - sum(REWARDS) / len(REWARDS)
        samples.append(Sample(a_session(f"s-{number}", reward), turns, reward, advantage))
    return samples


def answered(turn: Turn, new: list[Message], after: int | None, answer: Message) -> Turn:
    request = dump_request(Conversation(new, TOOLS), -1, after)
    return replace(turn, request=request, answer=dump_answer(answer))


def with_picture(sample: Sample) -> Sample:
    """The session, whose question is about a picture."""
    first, second = sample.turns
    name = hashlib.sha256(PICTURE).hexdigest()
    span = ImageSpan(2, PICTURE_TOKENS, PAD, name, name, (1, 4, 8))
    ids = np.insert(first.prompt_ids, 2, image_ids(name, PICTURE_TOKENS))
    asked = Message("user", f"Look: {mark(name)} List.")
    turns = [
        replace(
            answered(first, [asked], None, load_answer(first.answer)),
            prompt_ids=ids.astype(np.int32),
            images=(span,),
        ),
        replace(second, shared_tokens=second.shared_tokens + PICTURE_TOKENS),
    ]
    image = RecordedImage(name, "image/png", PICTURE)
    return dataclasses.replace(sample, turns=turns, images={name: image})


def rows_of(name: str, *, pictures: bool = False) -> list[Row]:
    """What a JSON Lines file of the export gives back."""
    form, found = open_format(name), sessions()
    if pictures:
        setattr(form, "shows_images", True)  # noqa: B010
        found = [with_picture(sample) for sample in found]
    units: Sequence[Sequence[Sample]] = [[sample] for sample in found]
    if form.unit == "pair":
        units = [(found[0], found[1])]
    rows = [row for unit in units for row in form.rows(unit)]
    assert rows
    return [orjson.loads(orjson.dumps(row, default=as_json)) for row in rows]


def check_in(python: Path, program: str, rows: list[Row]) -> str:
    """Runs a program in another environment, with the rows as JSON on its standard input."""
    script = f"import json, sys\nrows = json.load(sys.stdin)\n{program}"
    done = subprocess.run(
        [python, "-W", "ignore", "-c", script],
        input=orjson.dumps(rows),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


@needs(None if HARBOR.exists() else "Harbor is not installed: make harbor")
def test_harbor_reads_atif() -> None:
    program = """
from harbor.models.trajectories import Trajectory
for row in rows:
    trajectory = Trajectory.model_validate(row)
    assert [step.source for step in trajectory.steps] == ["user", "agent", "agent"]
    print(sum(len(s.metrics.completion_token_ids) for s in trajectory.steps if s.metrics))
"""
    counts = [int(line) for line in check_in(HARBOR, program, rows_of("atif")).split()]
    assert counts == [sum(len(t.sampled_ids) for t in s.turns) for s in sessions()]


@needs(None if HARBOR.exists() else "Harbor is not installed: make harbor")
def test_harbor_reads_atif_with_images() -> None:
    program = """
from harbor.models.trajectories import Trajectory
for row in rows:
    trajectory = Trajectory.model_validate(row)
    assert trajectory.has_multimodal_content()
    text, image, rest = trajectory.steps[0].message
    assert (text.type, image.type, rest.text) == ("text", "image", " List.")
    print(image.source.media_type, image.source.path[:22], len(image.source.path))
"""
    said = check_in(HARBOR, program, rows_of("atif", pictures=True)).splitlines()
    size = len(base64.b64encode(PICTURE)) + 22
    assert said == [f"image/png data:image/png;base64, {size}"] * len(REWARDS)


@needs(
    None
    if importlib.util.find_spec("verl")
    else "verl is not installed: python -m benchmarks.install reference"
)
@pytest.mark.filterwarnings("ignore")  # verl's own
def test_verl_reads_its_agent_loop_output() -> None:
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

    for row, reward in zip(rows_of("verl"), REWARDS, strict=True):
        fields = AgentLoopOutput.model_validate(row).as_dict()
        assert fields["responses"].shape == fields["response_mask"].shape
        assert float(fields["rm_scores"].sum()) == reward
    for row in rows_of("verl", pictures=True):
        read = AgentLoopOutput.model_validate(row)
        assert read.multi_modal_data is not None
        (image,) = read.multi_modal_data["images"]
        assert image.endswith(base64.b64encode(PICTURE).decode())
        assert read.prompt_ids.count(PAD) == PICTURE_TOKENS


def test_rows_have_the_fields_of_prime_rls_source() -> None:
    """The fields without a default of `TrainingSample` at 559b447 (2026-08-21), and `advantages`,
    with their types."""
    sample = msgspec.defstruct(
        "TrainingSample",
        [
            ("token_ids", list[int]),
            ("mask", list[bool]),
            ("logprobs", list[float]),
            ("temperatures", list[float]),
            ("env_name", str),
            ("advantages", list[float]),
        ],
        forbid_unknown_fields=True,
    )
    for row in rows_of("prime-rl"):
        read = msgspec.convert(row, sample)
        lengths = {len(getattr(read, name)) for name in row if name != "env_name"}
        assert lengths == {len(row["token_ids"])}


@pytest.mark.long
@needs(NO_PACKAGES)
def test_tinker_reads_its_datum() -> None:
    program = """
from tinker import types
from tinker.types._pydantic_types.datum import Datum
for row in rows:
    wire = {name: row[name] for name in ("model_input", "loss_fn_inputs")}
    datum = Datum.model_validate(wire)
    tokens = row["model_input"]["chunks"][0]["tokens"]
    inputs = {name: tensor["data"] for name, tensor in row["loss_fn_inputs"].items()}
    made = types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)
    assert made.model_input.length == len(tokens) == datum.model_input.length
    for name, tensor in made.loss_fn_inputs.items():
        read = datum.loss_fn_inputs[name]
        assert (tensor.dtype, tensor.tolist()) == (read.dtype, read.tolist()), name
        assert tensor.tolist() == inputs[name]
    print(len(tokens))
"""
    assert len(check_in(PACKAGES, program, rows_of("tinker")).split()) == len(REWARDS)


@pytest.mark.long
@needs(NO_PACKAGES)
def test_tinker_reads_chunks_of_images() -> None:
    program = """
from tinker.types._pydantic_types.datum import Datum
for row in rows:
    datum = Datum.model_validate({name: row[name] for name in ("model_input", "loss_fn_inputs")})
    before, image, after = datum.model_input.chunks
    assert datum.model_input.length == len(datum.loss_fn_inputs["target_tokens"].tolist())
    print(image.format, len(image.data), image.length)
"""
    said = check_in(PACKAGES, program, rows_of("tinker", pictures=True)).splitlines()
    assert said == [f"png {len(PICTURE)} {PICTURE_TOKENS}"] * len(REWARDS)


@pytest.mark.long
@pytest.mark.parametrize("name", ["messages", "dpo"])
@needs(
    None
    if (TORCHVISION / ".ready").exists()
    else "torchvision is missing: run python -m benchmarks.install torchvision"
)
def test_trl_trains_one_step_of_a_model_that_reads_images(name: str, tmp_path: Path) -> None:
    """Qwen3-VL with TRL's SFTTrainer and DPOTrainer, on the Parquet file of the export."""
    form = open_format(name)
    setattr(form, "shows_images", True)  # noqa: B010
    found = [with_picture(sample) for sample in sessions()]
    units: Sequence[Sequence[Sample]] = [[sample] for sample in found]
    if form.unit == "pair":
        units = [(found[0], found[1])]

    async def rows() -> AsyncIterator[Row]:
        for unit in units:
            for row in form.rows(unit):
                yield row

    asyncio.run(write(rows(), form, tmp_path / "rows.parquet"))
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.images.trl_reads", name, tmp_path],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (TORCHVISION, ROOT)))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told = orjson.loads(done.stdout.splitlines()[-1])
    assert np.isfinite(told["loss"])
    assert told["images"] == {"messages": 2, "dpo": 2}[name]


SKYRL_READS = """
import ast, importlib.util, logging
from pathlib import Path
import numpy as np
from pydantic import TypeAdapter
(skyrl,) = importlib.util.find_spec("skyrl").submodule_search_locations
file = Path(skyrl, "train/generators/base.py")  # alone: its package imports all of SkyRL
spec = importlib.util.spec_from_file_location("base", file)
base = importlib.util.module_from_spec(spec)
sys.modules["base"] = base
spec.loader.exec_module(base)
known = base.GeneratorOutput.__annotations__
assert set(output) <= set(known), set(output) - set(known)
tensors = ("pixel_values", "image_grid_thw")  # pydantic knows none
for name in output.keys() - set(tensors):
    TypeAdapter(known[name]).validate_python(output[name])
source = ast.parse(Path(skyrl, "train/utils/trainer_utils.py").read_text())
(check,) = [f for f in source.body if getattr(f, "name", "") == "validate_generator_output"]
names = {"np": np, "logger": logging, "GeneratorOutput": base.GeneratorOutput}
exec(compile(ast.Module([check], []), "skyrl", "exec"), names)
names["validate_generator_output"](len(output["response_ids"]), output)
"""
"""SkyRL's own types and its own check of a `GeneratorOutput`, which is `output`."""


@pytest.mark.long
@needs(NO_PACKAGES)
def test_skyrl_validates_its_generator_output() -> None:
    output = "output = {name: [row[name] for row in rows] for name in rows[0]}"
    check_in(PACKAGES, f"{output}\n{SKYRL_READS}", rows_of("skyrl"))


@pytest.mark.long
@needs(NO_PACKAGES)
async def test_skyrl_validates_what_our_generator_returns() -> None:
    generator = AgentGenerator(ClosableLoop(), [Task("hi", {"prompt": "Say hi."})])
    output = await generator.generate({"prompts": [[{"role": "user", "content": "Say hi."}]] * 4})
    check_in(PACKAGES, f"output = rows[0]\n{SKYRL_READS}", [output])


SKYRL_BATCHES = (
    """
import torch
output = rows[0]
for name in ("pixel_values", "image_grid_thw"):
    kind = torch.float32 if name == "pixel_values" else torch.int64
    output[name] = [torch.tensor(v, dtype=kind).reshape(shape) for shape, v in output[name]]
"""
    + SKYRL_READS
    + """
source = ast.parse(Path(skyrl, "backends/skyrl_train/training_batch.py").read_text())
(found,) = [each for each in source.body if getattr(each, "name", "") == "TensorList"]
names = {"torch": torch}
exec(compile(ast.Module([found], []), "skyrl", "exec"), names)
halves = [names["TensorList"](output[name])[:2].to("cpu") for name in tensors]
pixels, grids = (torch.cat(each.tensors) for each in halves)  # as its model's wrapper does
ids = [i for name in ("prompt_token_ids", "response_ids") for row in output[name] for i in row]
print(len(pixels), grids.prod(-1).sum().item(), ids.count(PAD))
"""
)
"""SkyRL's own list of tensors, of the samples' pixels and grids."""


@pytest.mark.long
@needs(NO_PACKAGES)
async def test_skyrl_batches_the_pixels_of_our_generator() -> None:
    seen, blind = paths_with_images()
    generator = AgentGenerator(looking(seen, blind), TASKS, pixels=Pixelated().joined)
    prompts = [[{"role": "user", "content": task.prompt}] for task in TASKS]
    output = await generator.generate({"prompts": prompts})
    for name in ("pixel_values", "image_grid_thw"):
        output[name] = [([*each.shape], each.flatten().tolist()) for each in output[name]]
    program = SKYRL_BATCHES.replace("PAD", str(PAD))
    patches, of_grids, tokens = map(int, check_in(PACKAGES, program, [output]).split())
    assert patches == of_grids == 4 * tokens
    assert tokens == sum(image.tokens for image in seen.images)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # TRL's own
def test_trl_trains_one_step_on_ours_with_gradients_equal_to_ours(
    tiny_model: Path, tmp_path: Path
) -> None:
    theirs = trl_gradients(tiny_model, tmp_path, rows_of("trl"))
    mine = our_gradients(tiny_model, sessions())
    assert theirs.keys() == mine.keys()
    assert max(float(gradient.abs().max()) for gradient in mine.values()) > 1e-3
    for name, gradient in mine.items():
        torch.testing.assert_close(theirs[name], gradient, atol=1e-6, rtol=1e-4, msg=name)


def trl_gradients(model: Path, folder: Path, rows: list[Row]) -> dict[str, Tensor]:
    """The gradients of the first step of TRL's GRPOTrainer, whose rollouts are the rows."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    found: dict[str, Tensor] = {}

    class Keep(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
            found.update(gradients(model))

    columns = {name: [row[name] for row in rows] for name in rows[0]}
    GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        args=GRPOConfig(
            output_dir=str(folder),
            per_device_train_batch_size=len(rows),
            num_generations=len(rows),
            max_steps=1,
            max_grad_norm=0.0,  # no clipping
            beta=0.0,
            loss_type="grpo",
            scale_rewards="none",
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
        ),
        reward_funcs=lambda reward, **_: reward,
        train_dataset=Dataset.from_dict({"prompt": ["x"] * len(rows)}),
        processing_class=AutoTokenizer.from_pretrained(model),
        rollout_func=lambda prompts, trainer: columns,
        callbacks=[Keep()],
    ).train()
    return found


def our_gradients(path: Path, samples: list[Sample]) -> dict[str, Tensor]:
    policy = Policy(
        ModelConfig(path=path, compute_dtype="float32"), OptimizerConfig(), device="cpu"
    )
    algorithm = Algorithm(
        AlgorithmConfig.model_validate(
            {
                "advantage": "dr_grpo",
                "prox": "reuse",
                "correction": Correction(weight=None),
                "aggregation": "sequence_mean_token_mean",
            }
        )
    )
    task = Task("t-1", {})
    rollouts = [
        build_rollout(
            Attempt(sample.session.session_id, task),
            AgentResult(AgentEnd.EXITED),
            sample.turns,
            Graded(sample.reward),
        )
        for sample in samples
    ]
    batch = build_batch([Group("g", task, rollouts)])
    algorithm.compute_advantages(batch)
    sequences = torch.arange(len(batch.sequences))
    loss = algorithm.loss(batch, algorithm.weigh(batch, sequences), version=0)
    for micro in policy.pack(batch, sequences.tolist()):
        policy.forward_backward(micro, batch, loss, temperature=1.0, entropy_grad=False)
    return gradients(policy.model)


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # TRL's own
@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_trl_trains_one_step_of_sft_and_dpo_on_ours(
    name: str, tiny_model: Path, tmp_path: Path
) -> None:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    rows = rows_of(name)
    kinds = {"sft": (SFTTrainer, SFTConfig), "dpo": (DPOTrainer, DPOConfig)}
    trainer_class, config_class = kinds[name]
    columns = ("input_ids", "labels") if name == "sft" else ("prompt", "chosen", "rejected")
    trainer = trainer_class(
        model=AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32),
        args=config_class(
            output_dir=str(tmp_path),
            per_device_train_batch_size=len(rows),
            max_steps=1,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
        ),
        train_dataset=Dataset.from_list([{c: row[c] for c in columns} for row in rows]),
        processing_class=AutoTokenizer.from_pretrained(tiny_model),
    )
    if name == "sft":
        (batch,) = trainer.get_train_dataloader()
        trained = (batch["labels"] != -100).sum()
        assert trained == sum(len(t.sampled_ids) for s in sessions() for t in s.turns)
    assert np.isfinite(trainer.train().training_loss)
