"""Whether a session may be learned from.

A folder opts in with a file `.agentic-proxy` that says `learn: true`, which `agentic-proxy run`
reads and notes in the session's metadata, or by a list in the learner's configuration. A person's
`learn: no`, a tag of the session, is stronger than both. Invariant: without a
yes there is no consent.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from proxy.records import FOLDER

FILE = ".agentic-proxy"
LEARN = "learn"
"""The entry of a session's metadata that says whether it may be learned from: `yes` or `no`."""
YES, NO = "yes", "no"
MAX_BYTES = 64 * 2**10


def consent_of_folder(folder: Path) -> str:
    """`yes` or `no`, as the nearest `.agentic-proxy` of the folder and those above it says; empty
    if there is none, or it does not say it. A file that is not readable YAML says `no`."""
    for place in (folder, *folder.parents):
        try:
            with (place / FILE).open("rb") as file:
                said = yaml.safe_load(file.read(MAX_BYTES))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, yaml.YAMLError):
            return NO
        if isinstance(said, Mapping) and isinstance(said.get(LEARN), bool):
            return YES if said[LEARN] else NO
        return ""
    return ""


def notes_of_folder(folder: Path) -> dict[str, str]:
    """What a session's metadata say of the folder in which its agent works."""
    said = consent_of_folder(folder)
    return {LEARN: said} if said else {}


def has_consented(
    metadata: Mapping[str, Any], folders: Iterable[Path], only: Mapping[str, str]
) -> bool:
    """Whether a session with this metadata may be learned from. `folders`: those that the
    configuration lists; `only`: entries that the session must have."""
    if any(str(metadata.get(name)) != value for name, value in only.items()):
        return False
    said = metadata.get(LEARN)
    if said is not None:
        return bool(said == YES)
    folder = metadata.get(FOLDER)
    if not isinstance(folder, str) or not folder:
        return False
    path = Path(os.path.normpath(folder))
    return any(path.is_relative_to(listed.expanduser().resolve()) for listed in folders)
