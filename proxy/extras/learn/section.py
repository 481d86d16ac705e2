"""What a recorder has to know of a learner: the section `recorder` of `learn.yaml`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml
from pydantic import Field, ValidationError

from proxy.config import OutsideExtra, ProxyConfig
from proxy.errors import ConfigurationError
from proxy.settings.section import Section
from proxy.settings.yaml_file import read_yaml

TARGET = "proxy.extras.learn.extra:LearnSection"
KEY_FILE = "learner.key"
ASSIGNMENT_FILE = "assignment.json"
JOURNAL_FILE = "journal.jsonl"


class Recorder(Section):
    """What the recorder knows of the learner.

    Example: Recorder(policy="work", folder=Path("runs/work"), folders=(Path("~/code/shop"),))"""

    policy: str = Field("work", pattern=r"^[A-Za-z0-9][A-Za-z0-9._]{0,40}$")
    """Name of the policy; its adapters are the policies `NAME-1`, `NAME-2`, …"""
    folder: Path = Path("runs/learn")
    """Folder of the learner: its key, journal and adapters. Mode 0700."""
    folders: tuple[Path, ...] = ()
    """Folders whose sessions may be learned from, with all that is in them, in addition to those
    with a file `.agentic-proxy` that says `learn: true`."""
    only: Mapping[str, str] = Field(default_factory=dict)
    """Only sessions whose metadata have these entries, such as `{person: ann}`."""

    @property
    def key_file(self) -> Path:
        return self.folder / KEY_FILE

    @property
    def assignment_file(self) -> Path:
        return self.folder / ASSIGNMENT_FILE

    @property
    def journal_file(self) -> Path:
        """What the learner has decided."""
        return self.folder / JOURNAL_FILE


def read_recorder(path: Path) -> Recorder:
    """The section `recorder` of a learner's configuration.

    Raises:
        ConfigurationError: the file cannot be read, or the section is wrong.
    """
    try:
        values = read_yaml(path) or {}
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot read the file: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path}: the file is not YAML: {error}") from error
    try:
        return Recorder.model_validate(values.get("recorder") or {})
    except (ValidationError, AttributeError) as error:
        raise ConfigurationError(f"{path}: recorder: {error}") from error


def with_learners(config: ProxyConfig, files: Sequence[Path], *, start: bool = True) -> ProxyConfig:
    """The recorder's configuration with these learners. `start`: it starts them."""
    settings = {
        "recorders": [read_recorder(file).model_dump(mode="json") for file in files],
        "start": [str(file) for file in files if start],
    }
    extras = [*config.extras, OutsideExtra(target=TARGET, settings=settings)]
    return config.model_copy(update={"extras": extras})


def make_folder(path: Path) -> None:
    """Creates the learner's folder, which only its owner can read."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.chmod(path, 0o700)
