"""Versions of weights are published as files, and a reader gets exactly the published bytes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import shortuuid
import torch
from safetensors.torch import load as load_safetensors

from proxy.extras.relay.weights.publication import MANIFEST, Manifest, decode_manifest
from proxy.extras.relay.weights.published_files import PullError, PullStopped
from proxy.extras.relay.weights.pull import LocalWeights, WeightStore
from tests.clouds import NO_GCS, NO_S3, amazon, google
from tests.needs import needs
from trainer.errors import ConfigError, WeightSyncError
from trainer.extras.relay import published_weights as publishing
from trainer.extras.relay.published_weights import Publisher, described
from trainer.weight_sync.published import Published
from trainer.weight_sync.segment import Named, SegmentReader, Written

KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from trainer.extras.relay.published_weights import Publisher, described

weights = [(f"w{i}", torch.ones(10) * i) for i in range(4)]

def killed():
    for number, named in enumerate(weights):
        if number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        yield named

publisher = Publisher(sys.argv[1], "run-a", Path(sys.argv[2]), full_every=10)
publisher.publish(killed(), described(weights, weights), 2)
"""

Weights = dict[str, torch.Tensor]


def weights_of(seed: int) -> Weights:
    """Several types and sizes, one tensor of which no byte changes."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(300, 8, generator=generator).to(torch.bfloat16),
        "norm": torch.randn(8, generator=generator),
        "fixed": torch.arange(100, dtype=torch.float16),
        "head": torch.randn(300, 8, generator=generator).to(torch.bfloat16),
    }


def stepped(weights: Weights, seed: int) -> Weights:
    """A few elements change by a little."""
    generator = torch.Generator().manual_seed(seed)

    def step(tensor: torch.Tensor) -> torch.Tensor:
        chosen = torch.rand(tensor.shape, generator=generator) < 0.01
        return torch.where(chosen, tensor * 1.01, tensor).to(tensor.dtype)

    return {name: tensor if name == "fixed" else step(tensor) for name, tensor in weights.items()}


def random_bytes(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (5000,), dtype=torch.uint8, generator=generator)


def publish(publisher: Publisher, weights: Mapping[str, torch.Tensor], version: int) -> Published:
    named = list(weights.items())
    return publisher.publish(iter(named), described(named, named), version)


def never() -> bool:
    return False


def read(local: LocalWeights) -> list[Named]:
    """As an engine reads it."""
    written = Written(str(local.path), local.size_bytes, local.manifest.digest)
    return [(name, tensor.clone()) for name, tensor in SegmentReader().receive(written)]


def is_same(found: list[Named], weights: Weights) -> bool:
    return [name for name, _ in found] == [*weights] and all(
        tensor.dtype == weights[name].dtype and torch.equal(tensor, weights[name])
        for name, tensor in found
    )


class Site:
    """Where a trainer publishes, and a worker that pulls."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self._folder = folder
        self.worker = self.another_worker("cache")
        self.files, self.root = fsspec.core.url_to_fs(url)

    def publisher(self, *, full_every: int = 10, run: str = "run-a") -> Publisher:
        return Publisher(self.url, run, self._folder / "scratch", full_every=full_every)

    def another_worker(self, name: str) -> WeightStore:
        return WeightStore(self.url, self._folder / name)

    def versions(self) -> list[str]:
        found = self.files.ls(f"{self.root}/run-a", detail=False)
        return sorted(str(each).rstrip("/").rpartition("/")[2].partition("-")[0] for each in found)

    def manifest(self, name: str) -> Manifest:
        return decode_manifest(self.files.cat_file(f"{self.root}/{name}/{MANIFEST}"), name)

    def change(self, path: str, change: Callable[[bytes], bytes]) -> None:
        at = f"{self.root}/{path}"
        self.files.pipe_file(at, change(self.files.cat_file(at)))


@pytest.fixture(params=["memory", "file"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    if request.param == "file":
        yield Site(f"file://{tmp_path}/published", tmp_path)
        return
    url = f"memory://{shortuuid.random(8)}/weights"
    yield Site(url, tmp_path)
    files = fsspec.filesystem("memory")
    if files.exists(url.rpartition("/")[0]):
        files.rm(url.rpartition("/")[0], recursive=True)


def test_every_version_is_read_bit_for_bit_by_deltas_and_by_a_late_worker(site: Site) -> None:
    publisher, weights = site.publisher(full_every=3), weights_of(0)
    for version in range(7):
        weights = stepped(weights, version)
        sent = publish(publisher, weights, version)
        assert (sent.full_bytes > 0) == (version % 3 == 0)
        local = site.worker.pull(sent.name, never)
        assert is_same(read(local), weights)
        if version:
            assert local.pulled_bytes == sent.delta_bytes < 0.2 * sent.size_bytes
        late = site.another_worker(f"late-{version}").pull(sent.name, never)
        assert late.path.read_bytes() == local.path.read_bytes()
    # A worker that missed versions reads the deltas between, across a full version.
    behind = site.another_worker("late-5").pull(sent.name, never)
    assert behind.pulled_bytes == sent.delta_bytes
    assert is_same(read(behind), weights)


def test_full_version_is_readable_as_safetensors(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "SHARD_BYTES", 4900)
    weights = weights_of(1)
    sent = publish(site.publisher(), weights, 1)
    full = site.manifest(sent.name).full
    assert full is not None
    assert [each.name for each in full.files] == [f"full-0000{n}.safetensors" for n in range(3)]
    found: dict[str, torch.Tensor] = {}
    for each in full.files:
        found |= load_safetensors(site.files.cat_file(f"{site.root}/{sent.name}/{each.name}"))
    assert is_same(sorted(found.items(), key=lambda each: [*weights].index(each[0])), weights)
    assert is_same(read(site.worker.pull(sent.name, never)), weights)


def test_delta_of_everything_is_as_large_as_the_weights(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "CHUNK", 1000)
    monkeypatch.setattr(publishing, "SHARD_BYTES", 3000)
    publisher = site.publisher()
    old, new = (weights_of(seed) | {"bits": random_bytes(seed)} for seed in (0, 1))
    first = publish(publisher, old, 0)
    site.worker.pull(first.name, never)
    sent = publish(publisher, new, 1)
    delta = site.manifest(sent.name).delta
    assert delta is not None
    assert {each.form for each in delta.pieces} == {"raw", "sparse"}
    assert len(delta.files) > 1
    assert 0.8 * sent.size_bytes < sent.delta_bytes <= sent.size_bytes
    assert is_same(read(site.worker.pull(sent.name, never)), new)


def test_unchanged_weights_are_a_version_without_files(site: Site) -> None:
    publisher = site.publisher()
    site.worker.pull(publish(publisher, weights_of(0), 0).name, never)
    sent = publish(publisher, weights_of(0), 1)
    assert (sent.delta_bytes, sent.full_bytes) == (0, 0)
    assert is_same(read(site.worker.pull(sent.name, never)), weights_of(0))


def test_negative_zero_and_nan_are_changes(site: Site) -> None:
    publisher = site.publisher()
    site.worker.pull(publish(publisher, {"w": torch.zeros(3)}, 0).name, never)
    new = torch.tensor([-0.0, torch.nan, 0.0])
    local = site.worker.pull(publish(publisher, {"w": new}, 1).name, never)
    (_, found) = read(local)[0]
    assert torch.equal(found.view(torch.int32), new.view(torch.int32))


def test_other_types_begin_with_a_full_version(site: Site) -> None:
    publisher, weights = site.publisher(), weights_of(0)
    site.worker.pull(publish(publisher, weights, 0).name, never)
    weights["norm"] = weights["norm"].to(torch.bfloat16)
    sent = publish(publisher, weights, 1)
    assert sent.delta_bytes == 0 < sent.full_bytes
    assert is_same(read(site.worker.pull(sent.name, never)), weights)


def test_old_versions_are_deleted_and_the_kept_ones_are_readable(site: Site) -> None:
    publisher, weights = site.publisher(full_every=2), weights_of(0)
    names = []
    for version in range(7):
        weights = stepped(weights, version)
        names.append(publish(publisher, weights, version).name)
    assert site.versions() == ["v000004", "v000005", "v000006"]
    for number, name in enumerate(names[4:]):
        site.another_worker(f"late-{number}").pull(name, never)
    with pytest.raises(PullError, match="does not have the published weights run-a/v000003-"):
        site.worker.pull(names[3], never)


def test_worker_keeps_two_versions(site: Site, tmp_path: Path) -> None:
    publisher, weights = site.publisher(), weights_of(0)
    for version in range(4):
        site.worker.pull(publish(publisher, weights, version).name, never)
    kept = sorted(path.name[:13] for path in (tmp_path / "cache").iterdir())
    assert kept == ["run-a.v000002", "run-a.v000003"]


def test_publisher_that_is_killed_leaves_no_version(tmp_path: Path) -> None:
    site = Site(f"file://{tmp_path}/published", tmp_path)
    before = publish(site.publisher(), weights_of(0), 1)
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, site.url, str(tmp_path / "scratch")],
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert killed.returncode == -signal.SIGKILL
    assert site.versions() == ["v000001", "v000002"]
    assert [*(tmp_path / "scratch").iterdir()] == []
    assert is_same(read(site.worker.pull(before.name, never)), weights_of(0))
    again = publish(site.publisher(), weights_of(3), 2)
    assert site.versions() == ["v000001", "v000002"]
    assert is_same(read(site.worker.pull(again.name, never)), weights_of(3))


def test_version_after_one_that_failed_is_full(site: Site) -> None:
    publisher, weights = site.publisher(), weights_of(0)
    publish(publisher, weights, 0)
    named = list(weights.items())
    with pytest.raises(WeightSyncError, match="gave 1 of 4 weights"):
        publisher.publish(iter(named[:1]), described(named, named), 1)
    sent = publish(publisher, weights_of(2), 1)
    assert sent.full_bytes > 0
    assert is_same(read(site.worker.pull(sent.name, never)), weights_of(2))


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data[:-1], "bytes, its manifest says"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "is corrupted: its SHA-256"),
    ],
)
def test_file_with_other_bytes_is_refused_and_leaves_nothing(
    site: Site, tmp_path: Path, change: Callable[[bytes], bytes], words: str, version: int
) -> None:
    publisher, weights = site.publisher(), weights_of(0)
    first = sent = publish(publisher, weights, 0)
    file = "full-00000.safetensors"
    if version == 1:
        site.worker.pull(first.name, never)
        sent, file = publish(publisher, stepped(weights, 1), 1), "delta-00000.bin"
    content = site.files.cat_file(f"{site.root}/{sent.name}/{file}")
    site.change(f"{sent.name}/{file}", change)
    with pytest.raises(PullError, match=words) as refused:
        site.worker.pull(sent.name, never)
    assert file in str(refused.value)
    names = [path.name for path in (tmp_path / "cache").iterdir()]
    assert not [name for name in names if name.startswith("run-a.v000001")]
    site.change(f"{sent.name}/{file}", lambda _: content)
    assert site.worker.pull(sent.name, never).manifest.version == version


def test_changed_base_on_the_workers_disk_is_found_and_replaced(site: Site) -> None:
    publisher, weights = site.publisher(), weights_of(0)
    local = site.worker.pull(publish(publisher, weights, 0).name, never)
    data = bytearray(local.path.read_bytes())
    data[100] ^= 1
    local.path.write_bytes(data)
    weights = stepped(weights, 1)
    sent = publish(publisher, weights, 1)
    with pytest.raises(PullError, match="the weights have digest"):
        site.worker.pull(sent.name, never)
    assert is_same(read(site.worker.pull(sent.name, never)), weights)


def test_pull_that_is_stopped_leaves_no_version(site: Site, tmp_path: Path) -> None:
    sent = publish(site.publisher(), weights_of(0), 0)
    with pytest.raises(PullStopped):
        site.worker.pull(sent.name, lambda: True)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".pulling"]
    assert is_same(read(site.worker.pull(sent.name, never)), weights_of(0))


def test_full_disk_is_an_error_that_says_so(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = publish(site.publisher(), weights_of(0), 0)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(PullError, match=r"No space left.*free space, which must be twice"):
        site.worker.pull(sent.name, never)
    with pytest.raises(WeightSyncError, match=r"No space left.*free space there and in"):
        publish(site.publisher(), weights_of(0), 1)


def test_manifest_of_another_release_is_refused(site: Site) -> None:
    sent = publish(site.publisher(), weights_of(0), 0)

    def newer(data: bytes) -> bytes:
        return json.dumps(json.loads(data) | {"format": 2}).encode()

    site.change(f"{sent.name}/{MANIFEST}", newer)
    with pytest.raises(PullError, match="has format 2, and this release reads 1"):
        site.worker.pull(sent.name, never)


def test_url_that_no_file_system_serves_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^engine\.publish=nothing://bucket: .*; install"):
        Publisher("nothing://user:secret@bucket", "run-a", tmp_path, full_every=1)


def test_memory_is_bounded_by_a_tensor(tmp_path: Path) -> None:
    """Tensors are made one at a time, and none is held when the next one is made."""
    alive: list[Any] = []

    def weights() -> Iterator[Named]:
        import weakref

        for number in range(5):
            assert not [each for each in alive if each() is not None]
            tensor = torch.full((1000,), float(number))
            alive.append(weakref.ref(tensor))
            yield f"w{number}", tensor
            del tensor

    shapes = [(f"w{number}", torch.empty(1000, device="meta")) for number in range(5)]
    publisher = Publisher(f"file://{tmp_path}/p", "run-a", tmp_path, full_every=9)
    for version in range(2):
        publisher.publish(weights(), described(shapes, shapes), version)
    assert np.all([each() is None for each in alive])


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # how gcsfs sends parts
@pytest.mark.parametrize(
    "server",
    [pytest.param(amazon, marks=needs(NO_S3)), pytest.param(google, marks=needs(NO_GCS))],
)
def test_versions_on_a_cloud(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    server: Callable[[pytest.MonkeyPatch], AbstractContextManager[str]],
) -> None:
    with server(monkeypatch) as bucket:
        site = Site(f"{bucket}/weights", tmp_path)
        publisher, weights = site.publisher(full_every=2), weights_of(0)
        weights["large"] = torch.randn(5_000_000)  # several parts of an upload
        for version in range(5):
            weights = stepped(weights, version)
            sent = publish(publisher, weights, version)
            assert is_same(read(site.worker.pull(sent.name, never)), weights)
        assert is_same(read(site.another_worker("late").pull(sent.name, never)), weights)
        assert site.versions() == ["v000002", "v000003", "v000004"]
