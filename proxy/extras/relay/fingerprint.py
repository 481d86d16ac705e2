"""Identifies the model in a folder by digests of its tokenizer and its architecture.

Two folders with the same fingerprint have the same token ids and the same architecture. The weights
are not part of the fingerprint because they change with every training step.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import orjson

from proxy.errors import ConfigurationError
from proxy.extras.relay.protocol import Fingerprint

_TOKENIZER_NOISE = ("truncation", "padding", "version")
_CONFIG_NOISE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")
"""Keys that differ between saves of the same model."""


def fingerprint(model: Path) -> Fingerprint:
    """The fingerprint of the checkpoint folder `model`.

    Raises:
        ConfigurationError: `tokenizer.json` or `config.json` is missing or is not JSON.
    """
    return Fingerprint(
        tokenizer=_digest(model / "tokenizer.json", _TOKENIZER_NOISE),
        architecture=_digest(model / "config.json", _CONFIG_NOISE),
    )


def _digest(path: Path, noise: tuple[str, ...]) -> str:
    try:
        fields: dict[str, Any] = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise ConfigurationError(
            f"{path}: {error}; the relay needs this file to compare the models of proxy and worker"
        ) from error
    known = {key: value for key, value in fields.items() if key not in noise}
    return hashlib.sha256(orjson.dumps(known, option=orjson.OPT_SORT_KEYS)).hexdigest()
