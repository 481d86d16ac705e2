"""The starter model is an ordinary checkpoint; its warm-up trains on what the proxy would
record."""

import json
import random
from pathlib import Path

import pytest
import torch
from renderers import Qwen3RendererConfig, create_renderer
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.quickstart.expert import transcript
from examples.starter_model.__main__ import main
from examples.starter_model.transcripts import Transcript, completion_ids, encode
from examples.starter_model.warmup import _common_prefix, _loss

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
    plain = [
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
