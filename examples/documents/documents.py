"""Tasks from a folder of documents: each part of a document is a task, through a template.

    data:
      train_sources:
        handbook:
          function:
            target: examples.documents.documents:parts
            settings: {folder: handbook, template: "Summarise in one sentence:\n{text}"}

Invariant: one document is in memory at a time, and every character of a document that is not white
space at the border of a part is in exactly one of its parts.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def parts(
    seed: int | None,
    *,
    folder: str,
    pattern: str = "**/*.md",
    part_chars: int = 4000,
    template: str = "{text}",
) -> Iterator[dict[str, Any]]:
    """The parts of the documents, document by document, in an order that the seed determines.

    Args:
        seed: None: in the order of the files' names.
        folder: the documents are UTF-8 text.
        pattern: which files of the folder are documents, as a glob pattern.
        part_chars: maximum number of characters of a part. A document is divided between
            paragraphs; a longer paragraph is divided between lines or words.
        template: the prompt: `{text}` is replaced by the part, `{title}` by its first heading or
            the file's name, and `{document}` by the file's path in the folder.

    Raises:
        ValueError: the folder has no document.
    """
    files = sorted(path for path in Path(folder).glob(pattern) if path.is_file())
    if not files:
        raise ValueError(f"{folder}: no document in it (no file fits the pattern {pattern!r})")
    if seed is not None:
        random.Random(seed).shuffle(files)
    for file in files:
        text, document = file.read_text(encoding="utf-8"), file.relative_to(folder).as_posix()
        heading = re.search(r"^#+ +(.+)$", text, re.MULTILINE)
        words = {"title": heading[1].strip() if heading else file.stem, "document": document}
        numbered = list(enumerate(divided(text, part_chars), start=1))
        if seed is not None:
            random.Random(f"{seed} {document}").shuffle(numbered)
        for number, part in numbered:
            values = {**words, "text": part}
            prompt = filled(template, values)
            yield {"task_id": f"{document}-{number}", "prompt": prompt, **values, "part": number}


def filled(template: str, values: Mapping[str, str]) -> str:
    """The template with its placeholders replaced; a placeholder in a document is text."""
    return re.sub(r"\{(text|title|document)\}", lambda found: values[found[1]], template)


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
