"""Runs a program as in a container: in a network namespace, as a user without capabilities, with a
root file system of its own that it cannot write.

The root file system has this machine's system and this Python with its packages.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.deploy.manifests import ROOT

SYSTEM = ("bin", "dev", "etc", "lib", "lib64", "proc", "sbin", "sys", "usr")
"""Folders of this machine that are in the root file system of each container."""
PATH = f"{sys.prefix}/bin:/usr/bin:/bin"


@dataclass(frozen=True)
class Mount:
    target: str
    source: Path | None = None
    """A folder or file; None for a file system in memory."""
    read_only: bool = False
    options: str = "mode=1777"
    """Of a file system in memory."""

    def steps(self) -> list[str]:
        if self.source is None:
            return [
                f"mkdir -p $root{self.target}",
                f"mount -t tmpfs -o {self.options} tmpfs $root{self.target}",
            ]
        made, source = f"$root{self.target}", shlex.quote(str(self.source))
        make = f"mkdir -p {made}"
        if self.source.is_file():
            make = f"mkdir -p $(dirname {made}); test -e {made} || touch {made}"
        steps = [make, f"mount --bind {source} {made}"]
        return [*steps, f"mount -o remount,bind,ro {made}"] if self.read_only else steps


@dataclass(frozen=True)
class Isolation:
    machine: str
    """Name of the network namespace."""
    root: Path
    """An empty folder, where the root file system is mounted."""
    user: int
    mounts: Sequence[Mount]
    variables: Mapping[str, str]

    def command(self, words: Sequence[str]) -> list[str]:
        """The command line that runs `words` in the container, in the same process."""
        self.root.mkdir(exist_ok=True)
        steps = [f"root={shlex.quote(str(self.root))}", "mount -t tmpfs -o mode=755 tmpfs $root"]
        for name in SYSTEM:
            if Path("/", name).is_symlink():
                steps.append(f"cp -P /{name} $root/{name}")
            elif Path("/", name).is_dir():
                steps.append(f"mkdir $root/{name}; mount --rbind /{name} $root/{name}")
        for mount in self.mounts:
            steps += mount.steps()
        for path in {sys.base_prefix, sys.prefix, str(ROOT)} - {"/usr"}:
            steps.append(f"mkdir -p $root{path}; mount --rbind {path} $root{path}")
        steps.append("mount -o remount,ro $root")
        steps.append(f"exec chroot $root {shlex.join(self._as_user(words))}")
        enter = ["nsenter", f"--net=/run/netns/{self.machine}", "unshare", "--mount"]
        return [*enter, "--propagation", "private", "sh", "-ec", "\n".join(steps)]

    def inside(self, process: int, words: Sequence[str]) -> list[str]:
        """The command line that runs `words` in the running container of this process."""
        enter = ["nsenter", f"--target={process}", "--net", "--mount", "--root", "--wd"]
        return [*enter, *self._as_user(words)]

    def _as_user(self, words: Sequence[str]) -> list[str]:
        identity = [f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups"]
        identity += ["--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]
        environment = ["env", "-i", *(f"{name}={value}" for name, value in self.variables.items())]
        return ["setpriv", *identity, *environment, *words]


def skip_without_mounts() -> None:
    """Skips the test if this machine refuses mounts in a namespace, which are not needed in CI."""
    tried = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    if subprocess.run(tried, capture_output=True, check=False).returncode:
        pytest.skip("no mounts here")
