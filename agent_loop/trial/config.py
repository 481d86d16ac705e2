"""The sections of a configuration that a trial reads: the agent's limits, the sampling parameters,
and the proxy that records the trial.

Each is part of a larger section under the same key names: `TrialConfig` of `remote_agent`,
`SamplingConfig` of `rollout`, `RecordingConfig` of `proxy_server`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from agent_loop.processes.readable import declared, repository
from agent_loop.trial.credit import CreditConfig
from agent_loop.trial.salvage import SalvageConfig
from proxy.engines.protocol import COLDEST
from proxy.records.alternatives import MAX_ALTERNATIVES
from proxy.settings.reaching import Patience
from proxy.settings.recorded import RecordedConfig
from proxy.settings.section import Common, Section
from proxy.wall import PARTS, SYSTEM, Wall, unreadable

_SANDBOX = rf"^(off|(light|strict)( without ({'|'.join(PARTS)})(, ({'|'.join(PARTS)}))*)?)$"


class TrialConfig(Section):
    """Example: TrialConfig(timeout_s=120, max_retries=0)"""

    await_reward_s: float = Field(0.0, ge=0)
    """Seconds that a trial waits for a posted reward after its agent has ended; 0: only rewards
    that were posted before then count."""
    credit: CreditConfig = CreditConfig()
    """Which turns the reward is credited to."""
    model_name: str = "policy"
    """The model name that agents are given."""
    policies: Mapping[str, str] = Field(default_factory=dict)
    """Other model names that the agent may request → policies: of `trainer.policies`, or of other
    runs on the same proxy (their `model.lora.policy`), whose tokens this run does not train. All
    other names are this run's `model.lora.policy`."""
    timeout_s: Common[float] = Field(600.0, gt=0)
    """Seconds that an agent may run."""
    max_retries: int = Field(1, ge=0)
    """Number of times that a trial that failed through no fault of its agent is started over."""
    retry_base_delay: float = Field(0.0, ge=0)
    """Seconds before the first retry; doubled for each further retry."""
    salvage: SalvageConfig | None = None
    """If set (`salvage: {}`), a lost trial is continued from its last answered turn instead of
    started over: its agent runs again in a fresh workspace, and the proxy answers its first calls
    from the recording (docs/rewind.md). For agents whose tools can run twice."""
    keep_workspaces: bool = False
    """Keep each trial's working directory. Its logs are kept in any case."""
    sandbox: Annotated[str, Field(pattern=_SANDBOX)] = "light"
    """`light`: local agents (`command`, `python`) and verifiers run behind a wall (docs/wall.md):
    they write to their working directory, an own home folder and an own `/tmp`, and read the
    system and their tools. `strict`: agents also get a private copy of the machine's files, which
    they can change; needs root. `off`: nothing is held. A run does not start on a machine that
    lacks a part of the wall, unless that part is named here: `light without ports, sockets`."""
    hide: tuple[Path, ...] = ()
    """Additional files and folders that are empty for local agents and verifiers."""
    show: tuple[Path, ...] = ()
    """Files and folders that local agents and verifiers can read, in addition to the system, their
    programs, what their command lines and `env` name, and what their Python scripts import."""
    hidden_fields: tuple[str, ...] | None = None
    """Fields of a task that the agent does not get. None: `answer`, `answers`, `solution` and
    `ground_truth` if a verifier, a grader or a judge gives the reward; these still get them."""

    def wall(self, hidden: Sequence[Path], shown: Sequence[Path]) -> Wall | None:
        """The wall of local agents, which also hides `hidden` and, if it is strict, also shows
        `shown`; None with `off`. Raises ConfigurationError: what `show` names is not there."""
        if self.sandbox_kind == "off":
            return None
        declared_ = declared("remote_agent.show", self.show)
        secret = () if os.geteuid() else map(Path, unreadable())
        unseen = (path for path in secret if not any(path.is_relative_to(p) for p in declared_))
        hide = [*self.hide, *hidden, *_place_of_the_run(), *unseen]
        return Wall(
            hide=tuple(str(path.absolute()) for path in hide),
            show=(*map(str, declared_), *(str(path.absolute()) for path in shown)),
            strict=self.sandbox_kind == "strict",
            accepted=self.accepted,
        )

    @property
    def sandbox_kind(self) -> str:
        """`light`, `strict` or `off`."""
        return self.sandbox.split()[0]

    @property
    def accepted(self) -> frozenset[str]:
        """The parts of the wall that this machine may lack."""
        return frozenset(re.findall(r"[a-z]+", self.sandbox.partition(" without ")[2]))

    @property
    def fields_hidden(self) -> frozenset[str]:
        """The names of the hidden fields, after the default is resolved."""
        return frozenset(self.hidden_fields or ())


def _place_of_the_run() -> Iterator[Path]:
    """The folder in which this process was started, and its repository, where they are inside of a
    folder of the system."""
    for folder in {Path.cwd(), repository(Path.cwd())}:
        if not any(Path(each).is_relative_to(folder) for each in SYSTEM):
            yield folder


class SamplingConfig(RecordedConfig):
    """Example: SamplingConfig(temperature=1.0, max_tokens=2048)"""

    temperature: float = Field(1.0, ge=COLDEST, le=2)
    """Replaces the agent's own temperature in training; the trainer scales its logits by the same
    value."""
    max_tokens: Common[int | None] = Field(None, ge=1)
    """Maximum number of tokens per answer; None: what the agent requests, within the context."""
    max_turns: int | None = Field(None, ge=1)
    """Maximum number of model calls per trial; None: the proxy's own limit."""
    top_k: int = Field(0, ge=0, le=MAX_ALTERNATIVES)
    """Sample from the most probable tokens only, this many; 0: from all. The trainer computes
    probabilities over the tokens that were left, which are recorded with each token. Equal logits
    stay together, and a token of which more than 20 were left is not trained
    (`rollout/tied_tokens`): 16 leaves room in bfloat16. Answers with a grammar
    (`response_format`) are sampled with 16 if this is 0."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Of those, sample from the most probable ones that together have this probability. Needs
    `top_k`."""
    seeded: bool = False
    """Make sampling reproducible from the run's seed; slower in large batches on a GPU."""

    @property
    def pinned(self) -> dict[str, float | int]:
        """The parameters that replace the agent's own in a training session, besides the seed."""
        pinned: dict[str, float | int] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k or -1,
        }
        pinned |= self.recorded
        if self.top_k > 0:
            pinned["alternatives"] = MAX_ALTERNATIVES
        if self.max_tokens is not None:
            pinned["max_tokens"] = self.max_tokens
        return pinned

    @property
    def session_limits(self) -> Mapping[str, int]:
        """The session's limits, in the proxy's format."""
        return {} if self.max_turns is None else {"max_turns": self.max_turns}


class RecordingConfig(Patience):
    """Example: RecordingConfig(profile="claude-code", patience_s=10)"""

    profile: Common[str] = "default"
    """The proxy's profile of the agent: what is removed, matched and kept of its requests."""
