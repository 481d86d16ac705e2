"""Publishes a learner's weights, or its adapter, for engines that only relay workers reach.

Invariant: with `engine.verify`, each publication has the trainer's scores on the probe, by which a
worker compares its engine; an adapter also those of the weights without it, and names a random
adapter, because a new one changes nothing, and an engine that ignores it would pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Protocol

from proxy.extras.relay.fingerprint import fingerprint
from proxy.extras.relay.weights.publication import ProbeScores
from trainer.batch import Batch
from trainer.extras.relay.published_adapters import AdapterPublisher
from trainer.extras.relay.published_weights import Publisher, described
from trainer.learning.models import Models, RestoreAdapter, UseRandomAdapter
from trainer.policy.adapter import adapter_config
from trainer.policy.scores import Scores
from trainer.ranks_config import RanksConfig
from trainer.weight_sync.dtypes import Report, agreed, rounded
from trainer.weight_sync.probe import probe_batch
from trainer.weight_sync.published import Published


class ComputeLogprobs(Protocol):
    """`compute_logprobs` of `trainer.learning.learner`, or `base_logprobs`."""

    def __call__(self, models: Models, batch: Batch, *, temperature: float) -> Scores: ...


class Publishing:
    """The weights of one learner, which gives the functions that score the probe."""

    def __init__(
        self,
        config: RanksConfig,
        models: Models,
        probe: Sequence[int],
        run: str,
        compute_logprobs: ComputeLogprobs,
        base_logprobs: ComputeLogprobs,
    ) -> None:
        """`run` names the run's folder at `engine.publish`; `base_logprobs` is without the adapter.

        Raises:
            ConfigError: no installed file system serves the URL.
        """
        self._config = config
        self._models = models
        self._probe = tuple(probe)
        self._compute_logprobs = compute_logprobs
        self._base_logprobs = base_logprobs
        engine, trainer, policy = config.engine, config.trainer, config.model.policy
        assert engine.publish is not None
        model = fingerprint(config.model.path).architecture
        self._weights: Publisher | None = None
        self._adapter: AdapterPublisher | None = None
        if policy:
            self._adapter = AdapterPublisher(engine.publish, run, policy, model=model)
        else:
            every = engine.publish_full_every
            self._weights = Publisher(
                engine.publish, run, trainer.run_dir, full_every=every, model=model
            )

    def publish(self, version: int, held: Sequence[Report]) -> Published:
        """As `Learner.publish_weights`."""
        if self._adapter is not None:
            return self._publish_adapter(self._adapter, version)
        assert self._weights is not None
        trained = self._models.policy.hf_shapes()
        dtypes = agreed(trained, held) if held else {}
        tensors = described(trained, list(rounded(trained, dtypes)))
        probe = self._scores()
        with closing(self._models.weights()) as weights:
            return self._weights.publish(rounded(weights, dtypes), tensors, version, probe)

    def close(self) -> None:
        if self._weights is not None:
            self._weights.close()

    def _publish_adapter(self, publisher: AdapterPublisher, version: int) -> Published:
        if not publisher.has_test:
            self._publish_test(publisher)
        config, probe = adapter_config(self._models.policy.model), self._scores()
        with closing(self._models.adapter()) as tensors:
            return publisher.publish(tensors, config, version, probe)

    def _publish_test(self, publisher: AdapterPublisher) -> None:
        base = self._scores(without_adapter=True)
        if base is None:
            return
        self._models.together(UseRandomAdapter())
        try:
            config, probe = adapter_config(self._models.policy.model), self._scores()
            assert probe is not None
            with closing(self._models.adapter()) as tensors:
                publisher.publish_test(tensors, config, base, probe)
        finally:
            self._models.together(RestoreAdapter())

    def _scores(self, *, without_adapter: bool = False) -> ProbeScores | None:
        """The trainer's scores on the probe; None: nothing is compared."""
        engine = self._config.engine
        if not engine.verify or len(self._probe) < 2:
            return None
        score = self._base_logprobs if without_adapter else self._compute_logprobs
        scores = score(self._models, probe_batch(self._probe), temperature=1.0)
        tolerance = engine.probe_tolerance(self._config.model)
        return ProbeScores(self._probe, tuple(scores.logprobs.tolist()), tolerance)
