"""The folder that is made of a pretrained Gemma 3, by the shape of a tiny one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    PreTrainedTokenizerFast,
)

from examples.pretrained.convert import MARKERS, write_folder
from examples.pretrained.terms import plain_text
from examples.quickstart.shop import SYSTEM, TOOLS
from proxy.config import RenderingConfig
from proxy.conversation import Conversation, Message
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import load_tokenizer
from tests.proxy.token_tree.test_tree import Recorder

WORDS = ("<pad>", "<eos>", "<bos>", "<unk>", "<unused0>", "<unused1>", "<start_of_turn>")
END = "<end_of_turn>"
CALL = '<tool_call>{"name": "price", "arguments": {"item": "hats"}}</tool_call><end_of_turn>'


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Gemma3ForCausalLM]:
    """The new folder, and a model with the weights that it was made of."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(initial_alphabet=alphabet, special_tokens=[*WORDS, END])
    bpe.train_from_iterator([SYSTEM], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )
    config = Gemma3TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        tie_word_embeddings=True,
    )
    config.quantization_config = {"quant_method": "gguf"}
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(config)
    before = Gemma3ForCausalLM(config)
    before.load_state_dict(model.state_dict())
    folder = tmp_path_factory.mktemp("pretrained") / "model"
    write_folder(model, tokenizer, folder)
    return folder, before


def test_folder_has_the_weights_and_new_embeddings_of_the_markers_alone(
    made: tuple[Path, Gemma3ForCausalLM],
) -> None:
    folder, before = made
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    changed = {
        name: (tensor != before.state_dict()[name]).any(-1).nonzero().flatten().tolist()
        for name, tensor in loaded.state_dict().items()
        if not torch.equal(tensor, before.state_dict()[name])
    }
    markers = [WORDS.index(word) for word in MARKERS]
    assert changed == {"model.embed_tokens.weight": markers, "lm_head.weight": markers}
    lengths = [m.get_input_embeddings().weight[markers].norm(dim=-1) for m in (loaded, before)]
    torch.testing.assert_close(*lengths)


def test_answers_end_with_a_turn_and_markers_are_single_tokens(
    made: tuple[Path, Gemma3ForCausalLM],
) -> None:
    folder, _ = made
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("<tool_call>") == [WORDS.index("<unused0>")]
    assert tokenizer.encode("</tool_call>") == [WORDS.index("<unused1>")]
    assert tokenizer.stop_token_ids == (len(WORDS), WORDS.index("<eos>"))
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())


def test_results_of_tools_extend_the_recorded_path(made: tuple[Path, Gemma3ForCausalLM]) -> None:
    folder, _ = made
    rendering = Rendering(load_tokenizer(folder), RenderingConfig())
    assert rendering.name == "template"
    recorder = Recorder(rendering)
    asked = Conversation([Message("system", SYSTEM), Message("user", "hats: 5")], TOOLS)
    prompt = rendering.tokenizer.decode(rendering.full(asked).tolist())
    assert prompt.startswith(f"<bos><start_of_turn>system\n{SYSTEM}\n")
    assert prompt.endswith(f"{END}\n<start_of_turn>user\nhats: 5{END}\n<start_of_turn>model\n")
    for _ in range(3):
        turn, message = recorder.ask(asked, CALL, close=False)
        assert turn.fork_cause is None
        assert [call.name for call in message.tool_calls] == ["price"]
        result = Message("tool", "hats: 4", tool_call_id=message.tool_calls[0].id)
        asked = Conversation([*asked.messages, message, result], asked.tools)
    path = rendering.tokenizer.decode(rendering.full(asked).tolist())
    assert path.count(CALL + "\n<start_of_turn>tool\nhats: 4" + END) == 3


def test_terms_are_the_page_without_its_frame() -> None:
    page = """<style>a</style><h1>Gemma Terms of Use</h1><p>Send feedback</p>
    <h1>Gemma Terms of Use</h1><p>You <b>agree</b>\n to this.</p><div>Send feedback</div>"""
    assert plain_text(page) == "Gemma Terms of Use\nYou agree to this."
