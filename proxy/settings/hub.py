"""Checkpoints and files of the Hugging Face hub, by name: `hf://owner/name` or
`hf://owner/name@revision`.

Invariant: a hub that cannot be reached is reported in one line, at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from proxy.errors import ConfigurationError

HUB = "hf://"
TIMEOUT_S = 10.0
"""Seconds until the hub counts as unreachable."""
CHECKPOINT = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""The files of a checkpoint that are used here; many repositories also hold other formats."""


def model_folder(path: Path) -> Path:
    """The folder of a checkpoint. One of the hub is downloaded, unless the hub's cache has it. Of a
    checkpoint that a run has saved, it is the folder `model` in it.

    Raises:
        ConfigurationError: the hub cannot be reached, or refuses the checkpoint.
    """
    if (name := hub_name(path)) is not None:
        return download(name, "model", CHECKPOINT)
    saved = path / "model"
    is_run = not (path / "config.json").exists() and (saved / "config.json").is_file()
    return saved if is_run else path


def hub_name(path: Path) -> str | None:
    """`owner/name[@revision]` if the path is `hf://owner/name[@revision]`; else None."""
    scheme, *name = path.parts or ("",)
    return "/".join(name) if scheme == HUB.rstrip("/") else None  # a Path has no double slash


def download(
    name: str,
    kind: Literal["model", "dataset"],
    patterns: Sequence[str],
    cache: Path | None = None,
) -> Path:
    """Downloads the files of `owner/name[@revision]` that fit the patterns; returns their folder.

    Raises:
        ConfigurationError: as `model_folder`.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    repository, _, revision = name.partition("@")
    try:
        return Path(
            huggingface_hub.snapshot_download(
                repository,
                repo_type=kind,
                revision=revision or None,
                allow_patterns=list(patterns),
                cache_dir=cache,
                etag_timeout=TIMEOUT_S,
            )
        )
    except LocalEntryNotFoundError as error:
        raise ConfigurationError(
            f"{HUB}{name}: the Hugging Face hub cannot be reached; download the {kind} where it "
            "can, and give its folder"
        ) from error
    except (HfHubHTTPError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigurationError(f"{HUB}{name}: the hub refuses it: {reason}") from error
