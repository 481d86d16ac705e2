"""The starter model is an ordinary checkpoint; its warm-up trains on what the proxy would
record."""

import hashlib
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from renderers import Qwen3RendererConfig, create_renderer
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.quickstart.expert import transcript
from examples.starter_model.__main__ import TOKENIZER_TRANSCRIPTS, main, make_tokenizer
from examples.starter_model.checkpoint import Shape, new_model
from examples.starter_model.tokenizer import save_tokenizer
from examples.starter_model.transcripts import Transcript, completion_ids, encode, load_expert
from examples.starter_model.warmup import Recipe, _common_prefix, _loss

EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True)
class Shipped:
    """A checkpoint of the repository, and how `make starter` makes it."""

    folder: Path
    expert: str
    flags: tuple[str, ...] = ()

    @property
    def context_tokens(self) -> int:
        given = dict(zip(self.flags[::2], self.flags[1::2], strict=True))
        return int(given.get("--context-tokens", Shape().context_tokens))


SHIPPED = {
    "quickstart": Shipped(EXAMPLES / "quickstart/model", "examples.quickstart.expert:transcript"),
    "mini_swe_agent": Shipped(
        EXAMPLES / "mini_swe_agent/model",
        "examples.mini_swe_agent.expert:transcript",
        ("--epochs", "4"),
    ),
    "claude_code": Shipped(
        EXAMPLES / "claude_code/model",
        "examples.claude_code.expert:transcript",
        ("--transcripts", "4480", "--lengths", "mixed", "--context-tokens", "4096"),
    ),
    "codex": Shipped(
        EXAMPLES / "codex/model",
        "examples.codex.expert:transcript",
        ("--transcripts", "4480", "--lengths", "mixed", "--context-tokens", "4096"),
    ),
    "swe_agent": Shipped(
        EXAMPLES / "swe_agent/model",
        "examples.swe_agent.expert:transcript",
        ("--transcripts", "2560", "--lengths", "mixed", "--context-tokens", "4096"),
    ),
    "judge": Shipped(
        EXAMPLES / "judge/model",
        "examples.judge.expert:transcript",
        ("--epochs", "4", "--lengths", "mixed"),
    ),
    "compaction": Shipped(
        EXAMPLES.parent / "benchmarks/compaction/model",
        "benchmarks.compaction.expert:transcript",
        ("--transcripts", "3840", "--epochs", "4", "--batch", "16", "--max-loss", "0.08"),
    ),
}


@pytest.fixture(params=SHIPPED)
def shipped(request: pytest.FixtureRequest) -> Shipped:
    return SHIPPED[request.param]


SMALL = [
    "--transcripts",
    "32",
    "--batch",
    "16",
    "--hidden-size",
    "32",
    "--layers",
    "1",
    "--heads",
    "2",
    "--vocab-size",
    "600",
    "--max-loss",
    "10",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("starter") / "model"
    assert (
        main(["--expert", "examples.quickstart.expert:transcript", "--out", str(out), *SMALL]) == 0
    )
    return out


@pytest.fixture
def renderer(folder: Path):
    return create_renderer(AutoTokenizer.from_pretrained(folder), Qwen3RendererConfig())


def test_checkpoint_loads_in_transformers(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    assert len(tokenizer) <= model.config.vocab_size
    assert tokenizer.eos_token_id == model.config.eos_token_id
    assert torch.isfinite(model(torch.tensor([tokenizer.encode("What?")])).logits).all()


def test_second_call_keeps_the_folder_and_other_arguments_replace_it(folder: Path) -> None:
    made = (folder / "starter.json").read_text()
    arguments = ["--expert", "examples.quickstart.expert:transcript", "--out", str(folder), *SMALL]
    assert main(arguments) == 0
    assert (folder / "starter.json").read_text() == made
    (folder / "starter.json").write_text(json.dumps({"fingerprint": "another"}))
    assert main(arguments) == 0
    assert (
        json.loads((folder / "starter.json").read_text())["fingerprint"]
        == json.loads(made)["fingerprint"]
    )


def test_model_that_learned_too_little_is_not_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model"
    arguments = ["--expert", "examples.quickstart.expert:transcript", "--out", str(out), *SMALL]
    assert main([*arguments, "--max-loss", "0.5"]) == 1
    assert "above --max-loss 0.5" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_unknown_expert_is_reported_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--expert", "examples.quickstart.expert:nobody", "--out", str(tmp_path)]) == 2
    assert "nobody" in capsys.readouterr().err


def test_chat_template_renders_what_the_renderer_renders(folder: Path, renderer) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for conversation in _conversations():
        for length in range(1, len(conversation.messages) + 1):
            for generate in (False, True):
                messages = conversation.messages[:length]
                text = tokenizer.apply_chat_template(
                    messages,
                    tools=conversation.tools or None,
                    add_generation_prompt=generate,
                    tokenize=False,
                )
                ids = renderer.render_ids(
                    messages, tools=conversation.tools or None, add_generation_prompt=generate
                )
                assert text == tokenizer.decode(ids)


def test_encoded_transcript_is_the_recorded_session(renderer) -> None:
    conversation = transcript(random.Random(3))
    encoded = encode(conversation, renderer)
    answers = [m for m in conversation.messages if m["role"] == "assistant"]
    chosen = [i for answer in answers for i in completion_ids(answer, renderer)]
    assert encoded.ids[encoded.mask].tolist() == chosen
    assert not encoded.mask[: int(encoded.mask.argmax())].any()
    first = next(i for i, m in enumerate(conversation.messages) if m["role"] == "assistant")
    prompt = renderer.render_ids(
        conversation.messages[:first], tools=conversation.tools, add_generation_prompt=True
    )
    assert encoded.ids[: len(prompt)].tolist() == prompt


def test_shared_prefix_changes_no_gradient(folder: Path, renderer) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    rng = random.Random(0)
    batch = [encode(transcript(rng), renderer) for _ in range(4)]
    assert _common_prefix(batch) > 50
    shared = _gradient(model, _loss(model, batch, with_beginning=True))
    # One row alone shares all but its last prompt token: the mean over rows weighs by tokens.
    counts = [int(item.mask.sum()) for item in batch]
    alone = sum(
        _gradient(
            model, model(input_ids=torch.from_numpy(item.ids)[None], labels=_labels(item)).loss
        )
        * count
        for item, count in zip(batch, counts, strict=True)
    ) / sum(counts)
    torch.testing.assert_close(shared, alone, atol=1e-5, rtol=1e-4)


def _labels(item) -> torch.Tensor:
    return torch.where(torch.from_numpy(item.mask), torch.from_numpy(item.ids), -100)[None]


def _gradient(model, loss: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return model.model.layers[0].self_attn.k_proj.weight.grad.clone()


def _conversations() -> list[Transcript]:
    rng = random.Random(1)
    plain: list[dict[str, Any]] = [
        {"role": "user", "content": "Ünïcode <b>?"},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "It is."},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "", "reasoning_content": "Think.", "tool_calls": _calls()},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "Done."},
    ]
    system = [{"role": "system", "content": "Be brief."}, *plain]
    tools = transcript(rng).tools
    return [
        transcript(rng),
        Transcript(plain, []),
        Transcript(system, tools),
        Transcript(system, []),
    ]


def _calls() -> list[dict]:
    return [
        {"type": "function", "function": {"name": "price", "arguments": '{"item": "pens"}'}},
        {"type": "function", "function": {"name": "price", "arguments": {"item": "é"}}},
    ]


class TestShippedModel:
    """The checkpoint in the repository, which `make starter` makes."""

    def test_make_starter_finds_it_up_to_date(
        self, shipped: Shipped, capsys: pytest.CaptureFixture[str]
    ) -> None:
        before = _hashes(shipped.folder)
        assert main(["--expert", shipped.expert, *shipped.flags, "--out", str(shipped.folder)]) == 0
        assert capsys.readouterr().out.endswith("is up to date\n")
        assert _hashes(shipped.folder) == before

    def test_its_tokenizer_and_shape_are_those_of_the_recipe(
        self, shipped: Shipped, tmp_path: Path
    ) -> None:
        rng = random.Random(Recipe().seed)
        transcripts = [load_expert(shipped.expert)(rng) for _ in range(TOKENIZER_TRANSCRIPTS)]
        shape = Shape(context_tokens=shipped.context_tokens)
        save_tokenizer(
            make_tokenizer(transcripts, shape.vocab_size), tmp_path, shape.context_tokens
        )
        made = {path.name: path.read_text() for path in tmp_path.iterdir()}
        assert made == {name: (shipped.folder / name).read_text() for name in made}
        model = AutoModelForCausalLM.from_pretrained(shipped.folder)
        wanted = new_model(shape, seed=0)
        shapes = {name: (p.shape, p.dtype) for name, p in model.named_parameters()}
        assert shapes == {name: (p.shape, p.dtype) for name, p in wanted.named_parameters()}

    def test_it_predicts_conversations_that_it_was_not_trained_on(self, shipped: Shipped) -> None:
        model = AutoModelForCausalLM.from_pretrained(shipped.folder)
        renderer = create_renderer(
            AutoTokenizer.from_pretrained(shipped.folder), Qwen3RendererConfig()
        )
        rng = random.Random(1234)
        batch = [encode(load_expert(shipped.expert)(rng), renderer) for _ in range(16)]
        with torch.no_grad():
            assert _loss(model, batch, with_beginning=True).item() < 0.15


def _hashes(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}
