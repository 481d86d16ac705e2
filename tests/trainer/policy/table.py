"""Computes the tables of docs/models.md: `python -m tests.trainer.policy.table`."""

from __future__ import annotations

import re
import tempfile
import time
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM
from transformers.utils import logging

from proxy.conversation import Conversation, Message, ToolCall
from proxy.rendering.tokenizer import load_tokenizer
from tests.proxy.checkpoint import write_checkpoint
from tests.proxy.rendering.harmony import HarmonyTokenizer
from tests.proxy.rendering.test_families import TOOL, with_its_tokens
from tests.proxy.token_tree.test_tree import Recorder
from tests.trainer.policy.architectures import ARCHITECTURES, Architecture
from trainer.errors import ConfigError
from trainer.policy.architecture import check_settings, without_noise
from trainer.policy.proof import prove
from trainer.policy.proof_on_copy import distances
from trainer.policy.shrink import shrunk

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
CHECKPOINT = Path("CHECKPOINT")
TOOL_TURNS = 3


def main() -> None:
    logging.set_verbosity_error()
    columns = (
        "model | class | layers of the proof | log-probabilities | gradients | seconds | renderer"
    )
    trained = [f"| {columns} |", "|---|---|---|---|---|---|---|"]
    refused = ["| model | class | why |", "|---|---|---|"]
    for architecture in ARCHITECTURES:
        print(architecture.title, flush=True)
        if architecture.refused:
            refused.append(
                f"| {architecture.title} | {_class(architecture)} | {reason(architecture)} |"
            )
        else:
            trained.append(_trained(architecture))
    text = PAGE.read_text()
    for name, rows in {"trained": trained, "refused": refused}.items():
        text = _filled(text, name, rows)
    PAGE.write_text(text)


def _filled(text: str, name: str, rows: list[str]) -> str:
    """`text` with these rows between the marks of the table `name`."""
    marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.S)
    return marked.sub(lambda found: found[1] + "\n".join(rows) + "\n" + found[2], text)


def reason(architecture: Architecture) -> str:
    """What the trainer says of a checkpoint of this architecture; empty if it is trained."""
    try:
        proven(architecture)
    except ConfigError as error:
        start = f"model.path: {CHECKPOINT}: "
        return str(error).removeprefix(start).removesuffix("; use another model")
    return ""


def proven(architecture: Architecture) -> str:
    """Why the trees of a checkpoint of this architecture are not computed in pieces; empty if they
    are. Raises ConfigError if it is not trained."""
    settings = without_noise(architecture.settings())
    check_settings(settings, CHECKPOINT, "model.path")
    return prove(settings, CHECKPOINT)


def _trained(architecture: Architecture) -> str:
    started = time.process_time()
    small = shrunk(without_noise(architecture.settings()))
    found = distances(small)
    seconds = time.process_time() - started
    cells = (
        architecture.title,
        _class(architecture),
        _layers(small),
        f"{found.logprobs:.0e}",
        f"{found.gradients:.0e}",
        f"{seconds:.1f}",
        f"{architecture.renderer}: {after_tool_turns(architecture.renderer)}",
    )
    return f"| {' | '.join(cells)} |"


def _class(architecture: Architecture) -> str:
    model = AutoModelForCausalLM._model_mapping.get(type(architecture.settings()), None)
    return f"`{model.__name__}`" if model else "none"


def _layers(small: Any) -> str:
    every = "sliding_attention" if getattr(small, "sliding_window", None) else "full_attention"
    kinds = getattr(small, "layer_types", None) or [every] * small.num_hidden_layers
    names = [kind.removesuffix("_attention") for kind in kinds]
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))


def after_tool_turns(renderer: str) -> str:
    """Whether each of three calls of a tool extends the recorded path, with the family's own
    renderer over a small vocabulary."""
    with tempfile.TemporaryDirectory() as folder:
        template = "plain.jinja" if renderer == "template" else "qwen3.jinja"
        checkpoint = write_checkpoint(Path(folder), template=template)
        tokenizer = load_tokenizer(checkpoint)
        if renderer == "gpt-oss":
            tokenizer = HarmonyTokenizer(tokenizer)
        rendering = with_its_tokens(tokenizer, renderer, checkpoint)
    recorder = Recorder(rendering)
    asked = Conversation([Message("user", "List.")], [TOOL])
    for number in range(TOOL_TURNS + 1):
        call = ToolCall(f"call_{number}", "shell", '{"command": "ls"}')
        answered = Conversation(
            [*asked.messages, Message("assistant", "Let me look.", None, [call])], asked.tools
        )
        sampled = rendering.full(answered)[len(rendering.full(asked)) :].tolist()
        ends = [at for at, token in enumerate(sampled) if token in rendering.stop_token_ids]
        text = rendering.tokenizer.decode(sampled[: ends[0] + 1] if ends else sampled)
        turn, message = recorder.ask(asked, text, close=False)
        if number and turn.fork_cause is not None:
            return f"forks ({turn.fork_cause.value})"
        results = [Message("tool", "a b", tool_call_id=each.id) for each in message.tool_calls]
        asked = Conversation(
            [*asked.messages, message, *(results or [Message("user", "Go on.")])], asked.tools
        )
    return "extends"


if __name__ == "__main__":
    main()
