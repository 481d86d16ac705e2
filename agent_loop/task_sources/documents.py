"""The task source `documents`: each part of a folder of documents is a task, through a template.

Invariant: one document is in memory at a time, and every character of a document that is not white
space at the border of a part is in exactly one of its parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from pydantic import Field

from agent_loop.errors import TaskFileError
from agent_loop.records import Task
from agent_loop.task_sources.protocol import TaskSourceConfig

DOCUMENT_BYTES = 64 << 20
"""Maximum size of a document, which is read whole."""


class DocumentTasks(TaskSourceConfig):
    """A folder of text documents.

    Example: DocumentTasks(folder="handbook", template="Summarise in one sentence:\n{text}")
    """

    folder: Path
    """Folder of the documents, which are UTF-8 text."""
    pattern: str = "**/*.md"
    """Which files of the folder are documents, as a glob pattern."""
    part_chars: int = Field(4000, ge=100)
    """Maximum number of characters of a part. A document is divided between paragraphs; a longer
    paragraph is divided between lines or words."""
    template: str = "{text}"
    """The prompt of a task: `{text}` is replaced by the part, `{title}` by its first heading or the
    file's name, and `{document}` by the file's path in the folder."""

    @property
    def private_files(self) -> tuple[Path, ...]:
        return (self.folder,)

    def build(self, name: str, *, seed: int, shuffle: bool) -> DocumentParts:
        """Raises TaskFileError: the folder has no document."""
        return DocumentParts(name, self, seed=seed, shuffle=shuffle)


class DocumentParts:
    """The parts of the documents, document by document, in an order that the seed determines."""

    def __init__(self, name: str, config: DocumentTasks, *, seed: int, shuffle: bool) -> None:
        self._name = name
        self._config = config
        self._seed = (seed, *name.encode())
        self._shuffle = shuffle
        self._files = sorted(path for path in config.folder.glob(config.pattern) if path.is_file())
        if not self._files:
            raise TaskFileError(
                f"{config.folder}: no document in it (no file fits the pattern {config.pattern!r})"
            )

    def epoch(self, number: int) -> Iterator[Task]:
        for place in self._order(len(self._files), number):
            parts = list(self._parts(self._files[place]))
            for part in self._order(len(parts), number, place):
                yield parts[part]

    def _parts(self, file: Path) -> Iterator[Task]:
        config, path = self._config, file.relative_to(self._config.folder).as_posix()
        text = _text(file)
        heading = re.search(r"^#+ +(.+)$", text, re.MULTILINE)
        words = {"title": heading[1].strip() if heading else file.stem, "document": path}
        for number, part in enumerate(divided(text, config.part_chars), start=1):
            values = {**words, "text": part}
            data = {"prompt": _filled(config.template, values), **values, "part": number}
            yield Task(f"{self._name}-{path}-{number}", data, self._name)

    def _order(self, count: int, *what: int) -> list[int]:
        order = np.arange(count)
        if self._shuffle:
            np.random.default_rng([*self._seed, *what]).shuffle(order)
        return [int(place) for place in order]


def _filled(template: str, values: Mapping[str, str]) -> str:
    """The template with its placeholders replaced; a placeholder in a document is text."""
    return re.sub(r"\{(text|title|document)\}", lambda found: values[found[1]], template)


def _text(file: Path) -> str:
    try:
        if file.stat().st_size > DOCUMENT_BYTES:
            raise TaskFileError(
                f"{file}: {file.stat().st_size} bytes; a document has at most {DOCUMENT_BYTES}; "
                "divide it"
            )
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskFileError(f"{file}: cannot read it as UTF-8 text: {error}") from error


def divided(text: str, chars: int) -> Iterator[str]:
    """The text in parts of at most `chars` characters, divided at the last border that fits: of
    paragraphs, else of lines, else of words, else anywhere."""
    text = text.strip()
    while len(text) > chars:
        borders = (text.rfind(border, 0, chars + 1) for border in ("\n\n", "\n", " "))
        end = next((border for border in borders if border > 0), chars)
        yield text[:end].rstrip()
        text = text[end:].lstrip()
    if text:
        yield text
