"""The teacher of a distillation: a running engine that scores recorded tokens, and the comparison
of its tokenizer with the policy's.

Invariant: a teacher gets the ids of the policy's own tokens, so both must have the same tokenizer;
any other teacher is refused before the run starts.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from trainer.batch import Batch, BatchPart, part_of
from trainer.errors import TrainingError, WeightSyncError
from trainer.learning.model_checks import TEACHER_KEY
from trainer.policy.parallel import Ranks
from trainer.policy.scores import Scores
from trainer.weight_sync.control import EngineControl


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
        """The log-probability of every trained token; the entropies are NaN. It is NaN for tokens
        that were sampled with top-k or a grammar (response_format), because an engine scores given
        tokens among the whole vocabulary.

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
        if batch.kept is not None:
            logprobs[(batch.kept >= 0).any(1)] = torch.nan
        return Scores(logprobs, torch.full_like(logprobs, torch.nan))

    @staticmethod
    def _score(control: EngineControl, batch: Batch, sequence: int) -> list[float]:
        return control.prompt_logprobs(batch.sequences[sequence].tolist())[0]
