"""The teacher of a distillation: a running engine that scores recorded tokens, and the comparison
of its tokenizer with the policy's.

Invariant: a teacher gets the ids of the policy's own tokens, so both must have the same tokenizer;
any other teacher is refused before the run starts.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from tokenizers import Tokenizer

from trainer.batch import Batch, BatchPart, part_of
from trainer.errors import ConfigError, TrainingError, WeightSyncError
from trainer.policy.parallel import Ranks
from trainer.policy.scores import Scores
from trainer.weight_sync.control import EngineControl

TEACHER_KEY = "algorithm.distillation.teacher"
_PROBE = (
    "The quick brown fox; naïve café, Ελληνικά, 数学と言語, 😀.\n\tdef f(x):\n        return x**2 "
    '+ 0.0314159 # 1234567890\n{"name": "value", "list": [1, 2, 3]}  <b>x</b>\r\n'
)
"""Text that tokenizers of different models cut differently."""


class EngineTeacher:
    """A model that a running vLLM serves. Implements `trainer.learning.models.FrozenModel`."""

    def __init__(self, url: str, ranks: Ranks, concurrency: int) -> None:
        """`url` may carry the engine's key, see `proxy.engines.address`."""
        self.ranks = ranks
        self._controls = [EngineControl([url]) for _ in range(concurrency)]

    def parts(self, batch: Batch) -> list[BatchPart]:
        """The batch, divided into one part for each rank."""
        return [part_of(batch, share) for share in self.ranks.shares(range(len(batch.sequences)))]

    def compute_logprobs(self, batch: Batch, *, temperature: float) -> Scores:
        """The log-probability of every trained token; the entropies are NaN.

        Raises:
            TrainingError: the engine does not answer, or the temperature is not 1, at which an
                engine scores given tokens.
        """
        if temperature != 1:
            raise TrainingError(
                f"{TEACHER_KEY}: an engine scores given tokens at temperature 1, not {temperature}"
                "; use rollout.temperature=1, or the folder of a checkpoint"
            )
        logprobs = torch.zeros(batch.num_tokens)
        sequences = range(len(batch.sequences))
        with ThreadPoolExecutor(len(self._controls)) as pool:
            workers = [self._controls[at % len(self._controls)] for at in range(len(sequences))]
            try:
                scored = list(pool.map(self._score, workers, [batch] * len(workers), sequences))
            except WeightSyncError as error:
                raise TrainingError(f"{TEACHER_KEY}: {error}") from error
        for sequence, values in zip(sequences, scored, strict=True):
            here = batch.sequence == sequence
            logprobs[here] = torch.tensor(values)[batch.position[here] - 1]
        return Scores(logprobs, torch.full_like(logprobs, torch.nan))

    @staticmethod
    def _score(control: EngineControl, batch: Batch, sequence: int) -> list[float]:
        return control.prompt_logprobs(batch.sequences[sequence].tolist())[0]


def have_same_tokens(policy: Path, other: Path, key: str) -> bool:
    """Whether both checkpoints have a tokenizer and it gives the same ids to the same tokens; False
    if one of them has no `tokenizer.json`.

    Raises:
        ConfigError: their tokenizers differ; `key` is the setting of the other one.
    """
    files = policy / "tokenizer.json", other / "tokenizer.json"
    if not all(file.is_file() for file in files):
        return False
    ours, theirs = (Tokenizer.from_file(str(file)).get_vocab() for file in files)
    if ours == theirs:
        return True
    token = next(t for t in sorted({*ours, *theirs}) if ours.get(t) != theirs.get(t))
    raise ConfigError(
        f"{key}: {other} has another tokenizer than the policy ({policy}): the token {token!r} has "
        f"the id {theirs.get(token)} there and {ours.get(token)} here; use a model with the same "
        "tokenizer, or fine-tune on the teacher's text with `agentic-train sft`"
    )


def check_engine_tokens(policy: Path, url: str) -> None:
    """
    Raises:
        ConfigError: the engine at `url` does not answer, or its tokenizer is not the policy's.
    """
    file = policy / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(
            f"{TEACHER_KEY}: {policy} has no tokenizer.json to compare the teacher's with"
        )
    tokenizer = Tokenizer.from_file(str(file))
    special = sorted(added.content for added in tokenizer.get_added_tokens_decoder().values())
    control = EngineControl([url], timeout_s=60.0)
    try:
        for text in (_PROBE, *special):
            ours = tokenizer.encode(text, add_special_tokens=False).ids
            (theirs,) = control.tokenize(text)
            if ours != theirs:
                raise ConfigError(
                    f"{TEACHER_KEY}: {url} has another tokenizer than the policy ({policy}): "
                    f"{text[:40]!r} is {theirs[:8]} there and {ours[:8]} here; use a model with the"
                    " same tokenizer, or fine-tune on the teacher's text with `agentic-train sft`"
                )
    except WeightSyncError as error:
        raise ConfigError(f"{TEACHER_KEY}: {error}") from error
    finally:
        control.close()
