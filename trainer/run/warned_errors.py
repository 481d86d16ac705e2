"""Errors of what only reports a run, which become warnings.

Invariant: no error of a tracker or of the report's writer changes how a run ends.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from proxy.machine.secrecy import without_credentials
from trainer.run.progress import WARNING

MAX_CHARS = 400
"""Characters of an error that a warning shows."""

logger = logging.getLogger(__name__)


@contextmanager
def errors_as_warnings(what: str, say: Callable[[str], None]) -> Iterator[None]:
    """An error inside is one line of warning, which begins with `what` could not be done.

    Example: with errors_as_warnings("report.html could not be written", progress.say): …
    """
    try:
        yield
    # The trackers' libraries have no common error: besides OSError they raise those of their
    # servers and of their artifact stores' clients. The report reads what any program wrote.
    except Exception as error:  # noqa: BLE001 (see above: the run has ended, and stays as it ended)
        text = f"{type(error).__name__}: {without_credentials(str(error))}"
        text = " ".join(text.split()).encode(errors="replace").decode()
        say(f"{WARNING}{what}: {text[:MAX_CHARS]}")
        # Only the places: the message of an error may contain a secret.
        logger.debug("%s:\n%s", what, "".join(traceback.format_tb(error.__traceback__)))
