"""`python -m examples.starter_model --expert MODULE:FUNCTION --out DIR` makes the starter model.

Invariants: a model that did not learn to copy (its loss is above `--max-loss`) is not saved,
because reinforcement could not improve it. If the `starter.json` of a folder names the same recipe
(arguments, transcripts and the source code of this package), the folder is complete and is kept.
Otherwise the whole folder is replaced.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import pydoc_data.topics
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from renderers import Qwen3RendererConfig, create_renderer
from tokenizers import Tokenizer
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from examples.starter_model.checkpoint import Shape, new_model, save_model
from examples.starter_model.tokenizer import CONTROL_WORDS, save_tokenizer, train_tokenizer
from examples.starter_model.transcripts import Transcript, encode, load_expert
from examples.starter_model.warmup import Recipe, warm_up

_RECORD = "starter.json"
_SCRATCH = ".starter-"
"""The scratch folder of a program that was killed stays; git ignores it by this name."""
# Number of transcripts that the tokenizer is trained on; they contain every word of the prompts.
TOKENIZER_TRANSCRIPTS = 500


def main(argv: list[str] | None = None) -> int:
    """Exit code 0: the folder is ready. 1: the model did not learn to copy. 2: invalid
    arguments."""
    arguments = _parser().parse_args(argv)
    shape = Shape(**{field.name: getattr(arguments, field.name) for field in fields(Shape)})
    recipe = Recipe(**{field.name: getattr(arguments, field.name) for field in fields(Recipe)})
    try:
        expert = load_expert(arguments.expert)
    except ValueError as error:
        print(f"starter_model: {error}", file=sys.stderr)
        return 2
    rng = random.Random(recipe.seed)
    transcripts = [expert(rng) for _ in range(recipe.transcripts)]
    fingerprint = _fingerprint(arguments, transcripts)
    out: Path = arguments.out
    if _is_made(out, fingerprint):
        print(f"starter model: {out} is up to date")
        return 0
    started = time.monotonic()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=_SCRATCH) as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        loss = make(folder, transcripts, shape, recipe)
        if loss > arguments.max_loss:
            print(
                f"starter_model: loss {loss:.3f} is above --max-loss {arguments.max_loss}: the "
                f"model did not learn to copy; raise --epochs (now {recipe.epochs})",
                file=sys.stderr,
            )
            return 1
        record = {"fingerprint": fingerprint, "loss": loss, "wall_s": time.monotonic() - started}
        (folder / _RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(out, ignore_errors=True)
        folder.rename(out)
    print(f"starter model: {out} made in {time.monotonic() - started:.0f} s, loss {loss:.3f}")
    return 0


def make(folder: Path, transcripts: list[Transcript], shape: Shape, recipe: Recipe) -> float:
    """Writes the whole checkpoint into the empty `folder`; returns the last loss, in nats."""
    save_tokenizer(make_tokenizer(transcripts, shape.vocab_size), folder, shape.context_tokens)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    renderer = create_renderer(tokenizer, Qwen3RendererConfig())
    encoded = [encode(transcript, renderer) for transcript in transcripts]
    lengths = sorted(len(item.ids) for item in encoded)
    print(
        f"{len(encoded)} transcripts of {lengths[len(lengths) // 2]} tokens "
        f"(longest {lengths[-1]}), {len(tokenizer)} words"
    )
    if lengths[-1] > shape.context_tokens:
        raise ValueError(
            f"a transcript of {lengths[-1]} tokens is longer than --context-tokens "
            f"{shape.context_tokens}; raise it"
        )
    model = new_model(shape, recipe.seed)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    loss = warm_up(model, encoded, recipe, lambda line: print(line, flush=True))
    end, padding = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    save_model(model, folder, end_of_turn=end, padding=padding)
    return loss


def make_tokenizer(transcripts: list[Transcript], vocab_size: int) -> Tokenizer:
    """The tokenizer for the first transcripts."""
    return train_tokenizer(_texts(transcripts[:TOKENIZER_TRANSCRIPTS]), vocab_size)


def _texts(transcripts: list[Transcript]) -> Iterator[str]:
    """The texts that the tokenizer is trained on: Python's manual, and rendered conversations."""
    yield from (text for _, text in sorted(pydoc_data.topics.topics.items()))
    for transcript in transcripts:
        text = render_jinja_template(
            [transcript.messages],
            tools=transcript.tools or None,
            chat_template=Path(__file__)
            .with_name("chat_template.jinja")
            .read_text(encoding="utf-8"),
        )[0][0]
        yield from re.split("|".join(map(re.escape, CONTROL_WORDS)), text)


def _fingerprint(arguments: argparse.Namespace, transcripts: list[Transcript]) -> str:
    """Changes with everything that the checkpoint depends on; comments and layout of the source
    code do not count."""
    given = {k: str(v) for k, v in vars(arguments).items() if k != "out"}
    digest = hashlib.sha256(json.dumps(given).encode())
    for transcript in transcripts:
        digest.update(json.dumps([transcript.messages, transcript.tools]).encode())
    folder = Path(__file__).parent
    for module in ("checkpoint", "tokenizer", "transcripts", "warmup"):
        source = (folder / f"{module}.py").read_text(encoding="utf-8")
        digest.update(ast.unparse(ast.parse(source)).encode())
    digest.update((folder / "chat_template.jinja").read_bytes())
    return digest.hexdigest()


def _is_made(out: Path, fingerprint: str) -> bool:
    try:
        record: dict[str, Any] = json.loads((out / _RECORD).read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return False
    return record.get("fingerprint") == fingerprint


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m examples.starter_model", description=__doc__)
    parser.add_argument("--expert", required=True, help="module:function that writes a Transcript")
    parser.add_argument("--out", required=True, type=Path, help="the checkpoint's folder")
    parser.add_argument(
        "--max-loss", type=float, default=0.1, help="in nats; above it, nothing is saved"
    )
    for part in (Shape, Recipe):
        for field in fields(part):
            flag = "--" + field.name.replace("_", "-")
            parser.add_argument(flag, type=type(field.default), default=field.default)
    return parser


if __name__ == "__main__":
    sys.exit(main())
