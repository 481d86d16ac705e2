"""What is checked of a run's models before one of them is loaded.

Invariant: a teacher gets the ids of the policy's own tokens, so both must have the same tokenizer;
any other teacher is refused before the run starts.
"""

from __future__ import annotations

import re
from pathlib import Path

from tokenizers import Tokenizer

from proxy.settings.late_section import load_extra
from trainer.algorithms import AlgorithmConfig
from trainer.errors import ConfigError, WeightSyncError
from trainer.policy.architecture import without_noise
from trainer.policy.model_config import ModelConfig, load_settings
from trainer.policy.parallelism import Parallelism, check_divided, check_heads
from trainer.policy.towers import check_reads
from trainer.weight_sync.control import EngineControl

TEACHER_KEY = "algorithm.distillation.teacher"
_PROBE = (
    "The quick brown fox; naïve café, Ελληνικά, 数学と言語, 😀.\n\tdef f(x):\n        return x**2 "
    '+ 0.0314159 # 1234567890\n{"name": "value", "list": [1, 2, 3]}  <b>x</b>\r\n'
)
"""Text that tokenizers of different models cut differently."""


def check_models(
    model: ModelConfig, algorithm: AlgorithmConfig, parallelism: Parallelism | None = None
) -> None:
    """Checks everything about the models that can be checked without loading their weights.

    Raises:
        ConfigError: a path is not a checkpoint of a causal model, the heads of a model cannot be
            divided as `parallelism` says, or a teacher or reference has another vocabulary than the
            policy.
    """
    divided = parallelism or Parallelism()
    ours = _vocabulary(model.path, "model.path", divided)
    others: dict[str, Path] = {}
    if model.vision != "text":
        check_reads(load_settings(model.path), model.path)
    if model.router_replay == "replay":
        check = load_extra("trainer.extras.experts.router_replay:check_replay")
        check(without_noise(load_settings(model.path)), model.path)
    if model.router_aux_loss:
        check = load_extra("trainer.extras.experts.router_balance:check_balance")
        check(without_noise(load_settings(model.path)), model.path)
    if algorithm.critic is not None and algorithm.critic.path is not None:
        _vocabulary(algorithm.critic.path, "algorithm.critic.path", divided)
    if algorithm.kl is not None and algorithm.kl.reference is not None:
        others["algorithm.kl.reference"] = algorithm.kl.reference
    if algorithm.distillation is not None:
        if algorithm.distillation.checkpoint is not None:
            others[TEACHER_KEY] = algorithm.distillation.checkpoint
        if algorithm.distillation.engine_url is not None:
            check_engine_tokens(model.path, algorithm.distillation.engine_url)
    for key, path in others.items():
        theirs = _vocabulary(path, key, divided)
        if not have_same_tokens(model.path, path, key) and theirs != ours:
            raise ConfigError(
                f"{key}: {path} has a vocabulary of {theirs} tokens, but the policy has {ours}; "
                "use a model with the same tokenizer"
            )


def _vocabulary(path: Path, key: str, parallelism: Parallelism) -> int:
    if not path.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
        raise ConfigError(
            f"{key}={path}: there is no such folder. If it is a model of the Hugging Face hub, run "
            f"`hf download {path} --local-dir models/{path.name}` and set {key}=models/{path.name}"
        )
    settings = load_settings(path, key)
    check_heads(settings, parallelism.context, key, path)
    check_divided(settings, parallelism, key, path)
    return int(settings.get_text_config().vocab_size)


def have_same_tokens(policy: Path, other: Path, key: str) -> bool:
    """Whether both checkpoints have a tokenizer and it gives the same ids to the same tokens; False
    if one of them has no `tokenizer.json`.

    Raises:
        ConfigError: their tokenizers differ; `key` is the setting of the other one.
    """
    files = policy / "tokenizer.json", other / "tokenizer.json"
    if not all(file.is_file() for file in files):
        return False
    ours, theirs = (Tokenizer.from_file(str(file)).get_vocab() for file in files)
    if ours == theirs:
        return True
    token = next(t for t in sorted({*ours, *theirs}) if ours.get(t) != theirs.get(t))
    raise ConfigError(
        f"{key}: {other} has another tokenizer than the policy ({policy}): the token {token!r} has "
        f"the id {theirs.get(token)} there and {ours.get(token)} here; use a model with the same "
        "tokenizer, or fine-tune on the teacher's text with `agentic-train sft`"
    )


def check_engine_tokens(policy: Path, url: str) -> None:
    """
    Raises:
        ConfigError: the engine at `url` does not answer, or its tokenizer is not the policy's.
    """
    file = policy / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(
            f"{TEACHER_KEY}: {policy} has no tokenizer.json to compare the teacher's with"
        )
    tokenizer = Tokenizer.from_file(str(file))
    special = sorted(added.content for added in tokenizer.get_added_tokens_decoder().values())
    control = EngineControl([url], timeout_s=60.0)
    try:
        for text in (_PROBE, *special):
            ours = tokenizer.encode(text, add_special_tokens=False).ids
            (theirs,) = control.tokenize(text)
            if ours != theirs:
                raise ConfigError(
                    f"{TEACHER_KEY}: {url} has another tokenizer than the policy ({policy}): "
                    f"{text[:40]!r} is {theirs[:8]} there and {ours[:8]} here; use a model with the"
                    " same tokenizer, or fine-tune on the teacher's text with `agentic-train sft`"
                )
    except WeightSyncError as error:
        raise ConfigError(f"{TEACHER_KEY}: {error}") from error
    finally:
        control.close()
