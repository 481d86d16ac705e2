"""Whether the trainer computes an architecture as the model's own code does, which is proven once.

Invariant: a policy is trained only if the proof on a small copy of it (`proof_on_copy.py`) holds. A
model that only differs where a tree is computed in pieces (`trainer.rows.prefix_tree`) is trained
without them.

The proof takes up to 5 s. It is repeated when the configuration, transformers, torch or this
code changes: the result is kept as a file in the user's cache folder, which is empty if all are
equal. Code that computes is loaded only for a proof.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers

from trainer.errors import ConfigError
from trainer.policy.architecture import without_noise
from trainer.policy.model_config import ModelConfig, load_settings
from trainer.policy.parallelism import Parallelism


def prove(settings: Any, path: Path) -> str:
    """Checks the architecture of `config.json` unless it was checked before. Returns why its trees
    are not computed in pieces; empty if they are.

    Raises ConfigError, which names the checkpoint and the layer that is computed differently.
    """
    known = _cache_folder() / _key(settings)
    if known.exists():
        return known.read_text(encoding="utf-8")
    from trainer.policy import proof_on_copy, shrink

    try:
        small = shrink.shrunk(settings)
        of_copy = _cache_folder() / _key(small)
        if of_copy.exists():
            in_pieces = of_copy.read_text(encoding="utf-8")
        else:
            found = proof_on_copy.find_differences(small)
            if found.whole is not None:
                raise ConfigError(
                    f"model.path: {path}: {settings.model_type} models are not supported:"
                    f" {found.whole}; use another model"
                )
            in_pieces = found.pieces or ""
    except (AttributeError, TypeError, ValueError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        if isinstance(error, TypeError) and (unset := _open_sizes(settings)):
            reason += f" (config.json leaves open {', '.join(unset)})"
        raise ConfigError(
            f"model.path: {path}: {settings.model_type} models cannot be computed packed: {reason};"
            " use another model"
        ) from error
    with suppress(OSError):  # a folder that cannot be written costs the proof at the next start
        known.parent.mkdir(parents=True, exist_ok=True)
        for file in (of_copy, known):
            file.write_text(in_pieces, encoding="utf-8")
    return in_pieces


def _open_sizes(settings: Any) -> list[str]:
    """The sizes that the configuration has without a value, which a model's code may need."""
    values = settings.get_text_config().to_dict().items()
    return [name for name, value in values if value is None and name.endswith(("_dim", "_size"))]


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "agentic-rl" / "architectures"


def _key(settings: Any) -> str:
    """A digest of everything that a proof depends on, for a model or its small copy."""
    total = hashlib.sha256()
    total.update(json.dumps(settings.to_dict(), sort_keys=True, default=str).encode())
    total.update(f"{torch.__version__} {transformers.__version__}".encode())
    here = Path(__file__).parent
    for file in sorted((*here.glob("*.py"), *here.with_name("rows").glob("*.py"))):
        total.update(file.read_bytes())
    return total.hexdigest()


def whole_trees(config: ModelConfig, parallelism: Parallelism) -> str:
    """A warning that trees larger than a micro-batch compute their prefixes several times, with the
    reason; empty if they are computed in pieces.

    Raises ConfigError as `load_model` for an architecture that cannot be trained.
    """
    if not config.share_prefixes:
        return ""
    if parallelism.divides_model:
        reason = "trainer.tensor_parallel, pipeline_parallel or expert_parallel divides the model"
    else:
        reason = prove(without_noise(load_settings(config.path)), config.path)
    said = f"model.share_prefixes: {config.path}: a prefix is shared within a micro-batch only"
    return reason and f"{said}: {reason}"
