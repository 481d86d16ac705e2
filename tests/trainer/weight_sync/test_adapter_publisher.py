"""Versions of an adapter are published as files, and a reader gets exactly the published bytes."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from proxy.extras.relay.weights.publication import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    MANIFEST,
    ProbeScores,
)
from proxy.extras.relay.weights.pull import WeightStore
from trainer.errors import WeightSyncError
from trainer.extras.relay.published_adapters import AdapterPublisher
from trainer.extras.relay.published_weights import Publisher, described
from trainer.weight_sync.segment import Named

CONFIG = {"peft_type": "LORA", "r": 2}


def tensors_of(seed: int) -> list[Named]:
    generator = torch.Generator().manual_seed(seed)
    return [(f"layer.lora_{each}", torch.randn(2, 8, generator=generator)) for each in "AB"]


def never() -> bool:
    return False


def versions(folder: Path) -> list[str]:
    return sorted(each.name.partition("-")[0] for each in (folder / "run-a").iterdir())


def test_a_version_is_a_folder_for_peft(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/published"
    publisher, store = AdapterPublisher(url, "run-a", "shop"), WeightStore(url, tmp_path / "cache")
    names = set()
    for version in (1, 2, 2):  # a run that continues publishes its version again
        sent = publisher.publish(tensors_of(version), CONFIG, version)
        local = store.pull(sent.name, never)
        assert sent.served is not None
        assert local.path.name == sent.served.adapter
        assert (sent.served.name, sent.served.version) == ("shop", version)
        names.add(sent.served.adapter)
        found = load_file(local.path / ADAPTER_FILE)
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors_of(version))
        assert json.loads((local.path / ADAPTER_CONFIG).read_text()) == CONFIG
    assert len(names) == 2
    assert local.pulled_bytes == 0


def test_changed_file_on_the_workers_disk_is_pulled_again(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/published"
    sent = AdapterPublisher(url, "run-a", "shop").publish(tensors_of(1), CONFIG, 1)
    store = WeightStore(url, tmp_path / "cache")
    for file in (ADAPTER_FILE, ADAPTER_CONFIG):
        local = store.pull(sent.name, never)
        before = (local.path / file).read_bytes()
        (local.path / file).write_bytes(before[:-1] + b"!")
        assert store.pull(sent.name, never).pulled_bytes == sent.size_bytes
        assert (local.path / file).read_bytes() == before


def test_last_two_versions_and_the_random_adapter_are_kept(tmp_path: Path) -> None:
    publisher = AdapterPublisher(f"file://{tmp_path}", "run-a", "shop")
    scores = ProbeScores((1, 2), (-1.0,), 1e-3)
    publisher.publish_test(tensors_of(0), CONFIG, scores, scores)
    for version in range(4, 9):
        publisher.publish(tensors_of(version), CONFIG, version)
    assert versions(tmp_path) == ["v000000", "v000007", "v000008"]
    again = AdapterPublisher(f"file://{tmp_path}", "run-a", "shop")  # the run continues
    again.publish_test(tensors_of(0), CONFIG, scores, scores)
    again.publish(tensors_of(9), CONFIG, 9)
    assert versions(tmp_path) == ["v000000", "v000008", "v000009"]


def test_versions_stay_in_order_if_the_run_continues_where_clocks_are_behind(
    tmp_path: Path,
) -> None:
    url, weights = f"file://{tmp_path}/published", [("w", torch.ones(10))]
    sent = []
    for hour, numbers in ((9, (1, 2)), (5, (3, 4, 5))):
        publisher = Publisher(url, "run-a", tmp_path, full_every=2)
        with patch("time.time_ns", lambda hour=hour: hour * 3600 * 10**9):
            for version in numbers:
                weights = [("w", torch.full((10,), float(version)))]
                about = described(weights, weights)
                sent.append(publisher.publish(iter(weights), about, version))
        publisher.close()
    times = [each.name.rpartition("-")[2] for each in sent]
    assert times == sorted(times)
    assert versions(tmp_path / "published") == ["v000003", "v000004", "v000005"]
    WeightStore(url, tmp_path / "cache").pull(sent[-1].name, never)


def test_failure_leaves_earlier_versions(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/published"
    publisher = AdapterPublisher(url, "run-a", "shop")
    sent = publisher.publish(tensors_of(1), CONFIG, 1)
    full = OSError(28, "No space left on device")
    with (
        patch("trainer.extras.relay.run_publications.Upload.write", side_effect=full),
        pytest.raises(WeightSyncError, match="No space left on device"),
    ):
        publisher.publish(tensors_of(2), CONFIG, 2)
    WeightStore(url, tmp_path / "cache").pull(sent.name, never)
    (tmp_path / "published" / sent.name / MANIFEST).unlink()
    publisher.publish(tensors_of(2), CONFIG, 2)
    assert versions(tmp_path / "published") == ["v000002"]


def test_only_publications_are_deleted(tmp_path: Path) -> None:
    """Not what users, file systems or tools put beside them."""
    url, elsewhere = f"file://{tmp_path}/published", tmp_path / "elsewhere"
    publisher = AdapterPublisher(url, "run-a", "shop")
    first = publisher.publish(tensors_of(0), CONFIG, 0)
    elsewhere.mkdir()
    (elsewhere / "file").touch()
    folder = tmp_path / "published" / "run-a"
    (folder / "notes").mkdir()
    for stray in (folder / ".DS_Store", folder / "notes" / "a.md"):
        stray.touch()
    (tmp_path / "published" / first.name / "link").symlink_to(elsewhere)
    (folder / "v000000-000000000000").symlink_to(elsewhere)
    for version in range(1, 4):
        publisher.publish(tensors_of(version), CONFIG, version)
    assert {".DS_Store", "notes"} <= {each.name for each in folder.iterdir()}
    assert (folder / "notes" / "a.md").exists()
    assert (elsewhere / "file").exists()
    assert not (tmp_path / "published" / first.name / ADAPTER_FILE).exists()
    assert len(list(folder.glob("v*/manifest.json"))) == 2


def test_url_from_which_nothing_may_be_deleted_gets_versions(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"file://{tmp_path}/published"
    publisher, store = AdapterPublisher(url, "run-a", "shop"), WeightStore(url, tmp_path / "cache")
    refused = PermissionError(13, "AccessDenied")
    with patch("fsspec.implementations.local.LocalFileSystem.rm", side_effect=refused):
        sent = [publisher.publish(tensors_of(each), CONFIG, each) for each in range(4)]
    store.pull(sent[-1].name, never)
    assert "old versions could not be deleted" in caplog.text
    publisher.publish(tensors_of(5), CONFIG, 5)
    assert versions(tmp_path / "published") == ["v000003", "v000005"]


def test_url_that_becomes_read_only_ends_the_update_and_keeps_the_version_before(
    tmp_path: Path,
) -> None:
    url = f"file://{tmp_path}/published"
    publisher, store = AdapterPublisher(url, "run-a", "shop"), WeightStore(url, tmp_path / "cache")
    sent = publisher.publish(tensors_of(1), CONFIG, 1)
    refused = OSError(30, "Read-only file system")
    with (
        patch("fsspec.implementations.local.LocalFileSystem.pipe_file", side_effect=refused),
        pytest.raises(WeightSyncError, match="Read-only file system"),
    ):
        publisher.publish(tensors_of(2), CONFIG, 2)
    store.pull(sent.name, never)


def test_second_process_that_publishes_the_run_ends_one_of_them(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/published"
    one, two = (AdapterPublisher(url, "run-a", "shop") for _ in range(2))
    other_run = AdapterPublisher(url, "run-b", "shop")
    one.publish(tensors_of(1), CONFIG, 1)
    two.publish(tensors_of(1), CONFIG, 1)  # the run was continued elsewhere
    other_run.publish(tensors_of(1), CONFIG, 1)
    with pytest.raises(WeightSyncError, match="another process publishes the run run-a"):
        one.publish(tensors_of(2), CONFIG, 2)
    other_run.publish(tensors_of(2), CONFIG, 2)
