"""Object stores on this machine, for tests with fsspec's real file systems."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

import fsspec
import pytest

from proxy.machine.port import free_port


def _missing(*packages: str) -> bool:
    return not all(importlib.util.find_spec(each.replace("-", "_")) for each in packages)


NO_S3 = "not installed: pip install s3fs 'moto[server]'" if _missing("s3fs", "moto") else None
NO_GCS = (
    "not installed: pip install gcsfs gcp-storage-emulator"
    if _missing("gcsfs", "gcp-storage-emulator")
    else None
)


@contextmanager
def amazon(monkeypatch: pytest.MonkeyPatch, address: str = "127.0.0.1") -> Iterator[str]:
    """The URL of a bucket of a server of S3, which fsspec's configuration of this process names."""
    from moto.server import ThreadedMotoServer

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    server = ThreadedMotoServer(ip_address=address, port=0)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": f"http://{host}:{port}"})
    try:
        bucket = f"bucket-{uuid4().hex}"  # moto keeps buckets as long as this process runs
        fsspec.filesystem("s3").mkdir(bucket)
        yield f"s3://{bucket}"
    finally:
        server.stop()


@contextmanager
def google(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a bucket of a server of Google Cloud Storage, without gRPC."""
    from gcp_storage_emulator.server import create_server

    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    port = free_port("127.0.0.1")
    server = create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket")
    server.start()
    given = {"endpoint_url": f"http://127.0.0.1:{port}", "token": "anon"}
    for scheme in ("gs", "gcs"):
        monkeypatch.setitem(fsspec.config.conf, scheme, given)
    try:
        yield "gs://bucket"
    finally:
        server.stop()
