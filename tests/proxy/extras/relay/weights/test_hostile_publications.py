"""What a manifest at the URL may not do to the machine of a worker."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from proxy.engines.segment_layout import new_digest, title
from proxy.extras.relay.weights import published_files
from proxy.extras.relay.weights.publication import (
    MANIFEST,
    File,
    Files,
    Manifest,
    StoredPiece,
    Tensor,
    encode_manifest,
)
from proxy.extras.relay.weights.published_files import PullError
from proxy.extras.relay.weights.pull import WeightStore
from tests.file_server import FileServer
from tests.proxy.extras.relay.weights_engine import Publications

SECRET = b"of this machine"


def never() -> bool:
    return False


@pytest.fixture
def published(tmp_path: Path) -> Publications:
    (tmp_path / "secret").write_bytes(SECRET)
    folder = tmp_path / "published"
    return Publications(folder, FileServer(folder))


@pytest.fixture
def store(tmp_path: Path, published: Publications) -> WeightStore:
    return WeightStore(f"file://{published.folder}", tmp_path / "cache")


def changed(published: Publications, name: str, change: Any) -> None:
    path = published.folder / name / MANIFEST
    manifest = msgspec.json.decode(path.read_bytes())
    change(manifest)
    path.write_bytes(msgspec.json.encode(manifest))


@pytest.mark.parametrize(
    "file", ["../../../secret", "/etc/passwd", "a/b", "..", "", ".hidden", "a" * 999]
)
def test_no_file_outside_of_the_publication_is_read(
    published: Publications, store: WeightStore, tmp_path: Path, file: str
) -> None:
    name = published.add(1, SECRET)
    changed(published, name, lambda m: m["full"]["files"][0].__setitem__(0, file))
    with pytest.raises(PullError, match="has a file"):
        store.pull(name, never)
    assert not list((tmp_path / "cache").glob("*.weights"))


@pytest.mark.parametrize("other", ["../cache", "run-b/v000001-000000000001", "run-a/../v1", "/etc"])
@pytest.mark.parametrize("field", ["base", "check"])
def test_no_publication_of_another_run_is_read(
    published: Publications, store: WeightStore, other: str, field: str
) -> None:
    if field == "base":
        name = published.add(1, b"weights")
        changed(published, name, lambda m: m.__setitem__("base", other))
    else:
        name, _ = published.add_adapter(1, -1.0)
        changed(published, name, lambda m: m["adapter"].__setitem__("check", other))
    with pytest.raises(PullError, match="is not a publication of its run"):
        store.pull(name, never)


@pytest.mark.parametrize(
    "adapter",
    ["../../../../tmp/x@1.0123456789abcdef", "shop@1.0123456789abcdef/..", "shop", ".@1.aa"],
)
def test_no_adapter_is_written_outside_of_the_folder(
    published: Publications, store: WeightStore, adapter: str
) -> None:
    name, _ = published.add_adapter(1, -1.0)
    changed(published, name, lambda m: m["adapter"].__setitem__("name", adapter))
    with pytest.raises(PullError, match="has an adapter"):
        store.pull(name, never)


def test_sizes_below_0_are_refused(published: Publications, store: WeightStore) -> None:
    name = published.add(1, b"weights")
    changed(published, name, lambda m: m["tensors"][0].__setitem__(2, [-7]))
    with pytest.raises(PullError, match="has a tensor of a negative size"):
        store.pull(name, never)


def test_weights_that_no_disk_holds_are_an_error(
    published: Publications, store: WeightStore, tmp_path: Path
) -> None:
    name = published.add(1, b"weights")
    changed(published, name, lambda m: m["tensors"][0].__setitem__(2, [1 << 50]))
    with pytest.raises(PullError, match="the free space, which must be twice the size"):
        store.pull(name, never)


def test_versions_that_depend_on_each_other_are_an_error(
    published: Publications, store: WeightStore
) -> None:
    names = [published.add(version, b"weights") for version in (1, 2)]
    for name, base in zip(names, reversed(names), strict=True):

        def circular(manifest: dict[str, Any], base: str = base) -> None:
            manifest["full"] = None
            manifest["base"] = base
            manifest["delta"] = {"files": [], "pieces": []}

        changed(published, name, circular)
    with pytest.raises(PullError, match="depends on itself"):
        store.pull(names[1], never)


@pytest.mark.parametrize("stored", [b"\x01", b"\x01" + bytes([1] + 7 * [0]) + b"no zlib"])
def test_changes_that_are_none_are_an_error_that_names_the_tensor(
    published: Publications, store: WeightStore, stored: bytes
) -> None:
    old, new = (bytes([first]) + bytes(range(63)) for first in (0, 9))
    names = [f"run/v00000{number}-{number:012}" for number in (1, 2)]
    tensor = Tensor("w", "uint8", (64,), "uint8")
    forms: tuple[Literal["raw", "sparse"], ...] = ("raw", "sparse")
    for name, content, form in zip(names, (old, stored), forms, strict=True):
        folder = published.folder / name
        folder.mkdir(parents=True)
        (folder / "a.bin").write_bytes(content)
        file = File("a.bin", len(content), hashlib.sha256(content).hexdigest())
        files = Files((file,), (StoredPiece(0, 0, 64, 0, 0, len(content), form),))
        digest = new_digest()
        digest.update(title(tensor.name, tensor.dtype, tensor.shape))
        digest.update(old if form == "raw" else new)
        whole = {"full": files} if form == "raw" else {"delta": files, "base": names[0]}
        manifest = Manifest(name, names.index(name) + 1, digest.hexdigest(), (tensor,), **whole)
        (folder / MANIFEST).write_bytes(encode_manifest(manifest))
    store.pull(names[0], never)
    with pytest.raises(PullError, match=r"000002: w: .*changes"):
        store.pull(names[1], never)


def test_manifest_without_end_is_not_read_into_memory(
    published: Publications, store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = published.add(1, b"weights")
    monkeypatch.setattr(published_files, "MANIFEST_BYTES", 100)
    with pytest.raises(PullError, match="has more than"):
        store.pull(name, never)


def test_weights_of_another_model_are_not_pulled(published: Publications, tmp_path: Path) -> None:
    name = published.add(1, b"weights")
    changed(published, name, lambda m: m.__setitem__("model", "a" * 64))
    url = f"file://{published.folder}"
    ours, others = (WeightStore(url, tmp_path / each, each * 64) for each in "ab")
    with pytest.raises(PullError, match=f"of another model than the engine's.* is {'a' * 12}, the"):
        others.pull(name, never)
    assert ours.pull(name, never).manifest == msgspec.json.decode(
        (published.folder / name / MANIFEST).read_bytes(), type=Manifest
    )
