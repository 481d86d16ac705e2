"""What an export format is: sessions in, rows of a table out.

Invariant: a format whose rows hold tokens has each sampled token of the exported sessions in
exactly one row, to be trained once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from proxy.extras.secrets import SessionSecrets
from proxy.records import RecordedImage, Session, Turn

Row = dict[str, Any]


class ImagesFound(Exception):
    """A session with images comes to a format whose rows are other ones with images: set its
    `shows_images`, and begin again."""


class LeftOut(Exception):
    """A unit has no rows. The message is what it has that the format cannot hold."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One session to export."""

    session: Session
    turns: Sequence[Turn]
    reward: float | None = None
    """The reward of the whole trial; None is no reward, which is not 0."""
    advantage: float = 0.0
    """`reward` minus the mean reward of the exported sessions of the same task."""
    secrets: SessionSecrets | None = None
    """Which tokens of `turns` spell secrets, and are masked; None: nothing is masked."""
    origins: Sequence[Session] = ()
    """Of a branch: the sessions that it continues, as far as the source has them. What their
    metadata shows to be a secret is one in the branch, too."""
    images: Mapping[str, RecordedImage] = field(default_factory=dict)
    """By sha256, those of `turns`."""

    @property
    def task_id(self) -> str:
        """The session's `task_id` in its metadata, or else its own id."""
        return str(self.session.metadata.get("task_id", self.session.session_id))


class TakesSessions(Protocol):
    """Which sessions a reader of recorded sessions takes, and how."""

    @property
    def unit(self) -> Literal["session", "pair"]:
        """`session`: it gets one sample. `pair`: it gets two of one task, the better one first."""
        ...

    @property
    def trains(self) -> bool:
        """Whether it is meant for training only: sessions of kind eval are then left out, unless
        they are asked for."""
        ...

    @property
    def needs_reward(self) -> bool:
        """Whether sessions without a reward are left out."""
        ...


class ExportFormat(TakesSessions, Protocol):
    """A format. `registry` creates it without arguments. One whose rows hold no token ids may say
    `texts_only = True`: without a tokenizer, sessions with secrets are then exported, too. One
    whose rows hold images says `no_images = None`, another one may say why not."""

    def schema(self, pa: Any) -> Any:
        """The Arrow schema of the rows; `pa` is pyarrow. A value that is not a string in a column
        of strings is written as JSON text."""
        ...

    def rows(self, samples: Sequence[Sample]) -> Iterator[Row]:
        """The rows of one unit."""
        ...
