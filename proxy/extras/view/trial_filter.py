"""Which trials of a run a reader of the page wants to see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from proxy.run_files.json_lines import Line


@dataclass(frozen=True, slots=True)
class TrialFilter:
    """Selects trials. Example: TrialFilter(kind="eval", max_reward=0.0)"""

    kind: str = ""
    status: str = ""
    source: str = ""
    task: str = ""
    text: str = ""
    """Stands in the id, the task, the agent or the error, whatever the case."""
    min_reward: float | None = None
    max_reward: float | None = None
    min_tokens: int = 0
    errors: bool = False
    """Only trials with an error."""

    def matches(self, line: Line) -> bool:
        equal = (("kind", self.kind), ("status", self.status), ("task_id", self.task))
        if any(value and line.get(name) != value for name, value in equal):
            return False
        if self.source and line.get("source") != self.source:
            return False
        if self.errors and not line.get("error"):
            return False
        reward = _number(line.get("reward"))
        if self.min_reward is not None and (reward is None or reward < self.min_reward):
            return False
        if self.max_reward is not None and (reward is None or reward > self.max_reward):
            return False
        if self.min_tokens and (_number(line.get("sampled_tokens")) or 0) < self.min_tokens:
            return False
        return not self.text or self._has_text(line)

    def _has_text(self, line: Line) -> bool:
        fields = (line.get(name) for name in ("trial_id", "task_id", "agent", "source", "error"))
        return any(self.text.lower() in str(each).lower() for each in fields if each)


def _number(value: Any) -> float | None:
    """None for a value of another type, which a foreign program may have written."""
    return value if isinstance(value, int | float) else None
