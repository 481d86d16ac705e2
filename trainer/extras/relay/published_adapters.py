"""Publishes versions of a LoRA adapter as files, for engines that no collective reaches.

Each version is a publication of its own (`relay.weights`), with the adapter as one file in PEFT's
format. It names another one, of a random adapter, by which a worker tests each new engine.

Invariant: a version has the same name in engines as if the trainer had loaded it there itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from safetensors.torch import save

from proxy.extras.relay.weights.adapter_folders import adapter_digest
from proxy.extras.relay.weights.publication import (
    ADAPTER_FILE,
    Adapter,
    Files,
    Manifest,
    ProbeScores,
)
from proxy.records import ServedPolicy
from trainer.extras.relay.run_publications import RunPublications
from trainer.policy.adapter import FILE_METADATA
from trainer.weight_sync.adapters import adapter_name, on_host
from trainer.weight_sync.published import Published
from trainer.weight_sync.segment import Named


class AdapterPublisher:
    """Example:
    publisher = AdapterPublisher("s3://bucket/weights", "run-a", "planner")
    publisher.publish(adapter_tensors(model), adapter_config(model), 12)
    """

    def __init__(self, url: str, run: str, policy: str, *, model: str | None = None) -> None:
        """`run` names the run's folder at the URL. `model`: the digest of the architecture.

        Raises:
            ConfigError: no installed file system serves the URL.
        """
        self._run = RunPublications(url, run, model)
        self._policy = policy
        self._base: ProbeScores | None = None
        self._check: str | None = None

    @property
    def has_test(self) -> bool:
        """Whether `publish_test` was called."""
        return self._check is not None

    def publish_test(
        self,
        tensors: Iterable[Named],
        config: Mapping[str, Any],
        base: ProbeScores,
        probe: ProbeScores,
    ) -> None:
        """Makes workers test each engine by its own weights, whose scores are `base`, and by this
        random adapter, whose scores are `probe`.

        Raises:
            WeightSyncError: as `publish`.
        """
        self._base = base
        self._check = self._write(tensors, config, 0, "check", probe).name

    def publish(
        self,
        tensors: Iterable[Named],
        config: Mapping[str, Any],
        version: int,
        probe: ProbeScores | None = None,
    ) -> Published:
        """Writes the adapter.

        Raises:
            WeightSyncError: it could not be written; earlier versions are unchanged.
        """
        manifest = self._write(tensors, config, version, str(version), probe)
        assert manifest.full is not None
        assert manifest.adapter is not None
        served = ServedPolicy(self._policy, version, manifest.adapter.name)
        size = manifest.full.size_bytes
        return Published(manifest.name, version, size, 0, size, served)

    def _write(
        self,
        tensors: Iterable[Named],
        config: Mapping[str, Any],
        version: int,
        label: str,
        probe: ProbeScores | None,
    ) -> Manifest:
        held = on_host(tensors)
        engine_name = adapter_name(self._policy, label, held, config)
        with self._run.writing(version) as name:
            upload = self._run.upload(name, ADAPTER_FILE)
            try:
                upload.write(save(dict(held), metadata=FILE_METADATA))
                file = upload.finish()
            finally:
                upload.discard()
            adapter = Adapter(engine_name, json.dumps(config, indent=2), self._base, self._check)
            digest = adapter_digest(file.sha256, adapter.config)
            full = Files((file,), ())
            manifest = Manifest(name, version, digest, (), full, probe=probe, adapter=adapter)
            self._run.commit(manifest, kept=self._check)
        return manifest
