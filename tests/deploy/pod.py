"""Runs a pod of the manifests as processes of this machine.

As in a cluster, the containers share a network namespace; each is isolated (`isolation.py`), with
the pod's volumes where the manifest mounts them. Commands, variables, paths and the user are the
manifest's. In place of the images there are this machine's system and this Python with its
packages; the images' variables are set.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.deploy.isolation import PATH, Isolation, Mount
from tests.deploy.manifests import ROOT, Resource, image_variables, pod_specs, render

START_S = 300.0
"""A vLLM on a busy machine takes minutes."""


@dataclass(frozen=True)
class Site:
    """What a pod finds where it runs."""

    claims: Mapping[str, Path]
    """Name of a volume claim → its folder."""
    secrets: Mapping[str, Mapping[str, str]]
    """Name of a secret → its keys with their values. One that is missing must be optional."""
    config_maps: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Name of a ConfigMap → its files."""
    edits: Mapping[str, str] = field(default_factory=dict)
    """Placeholder → what a user writes in its place, in every variable and argument."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Further variables of every container."""
    arguments: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Name of a container → further arguments."""
    commands: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Name of a container → the program in place of its command and arguments."""


class Pod:
    """Example:
    async with running_pod("relay/workers", "Deployment/agentic-worker", "m0", site, folder) as pod:
        print(pod.log("worker").read_text())
    """

    def __init__(self, spec: Resource, machine: str, site: Site, folder: Path) -> None:
        """`machine` is the name of a network namespace, and of the pod."""
        self._spec, self._machine, self._site, self._folder = spec, machine, site, folder
        self._user = int(spec["securityContext"]["runAsUser"])
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._volumes = {each["name"]: each for each in spec["volumes"]}
        for volume in self._volumes.values():
            self._make(volume)

    def log(self, container: str) -> Path:
        return self._folder / f"{self._machine}-{container}.log"

    async def start(self) -> None:
        """Starts the sidecars, each of which must have started before the next, then the others.

        Raises:
            AssertionError: a container has ended.
        """
        for container in self._spec.get("initContainers", ()):
            assert container["restartPolicy"] == "Always"
            await self._run(container)
            await self._started(container)
        for container in self._spec["containers"]:
            await self._run(container)
            if "startupProbe" in container:
                await self._started(container)

    async def wait(self, container: str) -> int:
        """Waits until the container has ended by itself. Returns its exit status."""
        return await self._running.pop(container).wait()

    async def stop(self) -> dict[str, int]:
        """As the kubelet ends a pod: sidecars after the others. Returns the exit statuses."""
        statuses = {}
        names = [each["name"] for each in self._spec["containers"]]
        names += [each["name"] for each in reversed(self._spec.get("initContainers", ()))]
        for name in names:
            process = self._running.pop(name)
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            statuses[name] = await process.wait()
        return statuses

    def kill(self) -> None:
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def check(self) -> None:
        """Raises AssertionError if a container has ended; the message has the end of its log."""
        for name, process in self._running.items():
            if process.returncode is not None:
                log = self.log(name).read_text()
                raise AssertionError(f"{name} ended: {process.returncode}\n{log[-4000:]}")

    async def _run(self, container: Resource) -> None:
        name = container["name"]
        given = self._site.commands.get(name)
        words = [*container["command"], *container.get("args", ())] if given is None else [*given]
        words += self._site.arguments.get(name, ())
        with self.log(name).open("ab") as log:
            self._running[name] = await asyncio.create_subprocess_exec(
                *self._isolated(container, words),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    async def _started(self, container: Resource) -> None:
        """Returns when the startup probe succeeds."""
        probe = self._isolated(container, _probe(container))
        async with asyncio.timeout(START_S):
            while True:
                self.check()
                process = await asyncio.create_subprocess_exec(
                    *probe, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
                if await process.wait() == 0:
                    return
                await asyncio.sleep(1)  # as the kubelet, which asks again after a period

    def _isolated(self, container: Resource, words: list[str]) -> list[str]:
        """The command line that runs `words` in the container."""
        assert container["securityContext"]["readOnlyRootFilesystem"]
        return Isolation(
            machine=self._machine,
            root=self._folder / f"{self._machine}-{container['name']}-root",
            user=self._user,
            mounts=[self._mounted(each) for each in container["volumeMounts"]],
            variables=self._variables(container),
        ).command([*map(self._edited, words)])

    def _mounted(self, mount: Resource) -> Mount:
        assert "subPath" not in mount
        path, volume = mount["mountPath"], self._volumes[mount["name"]]
        if "Memory" in str(volume.get("emptyDir")):
            # The kubelet mounts one for the pod; here no two containers share one.
            return Mount(path)
        return Mount(path, self._path(volume), read_only="readOnly" in mount)

    def _variables(self, container: Resource) -> dict[str, str]:
        image = container["image"].partition(":")[0].removeprefix("agentic-")
        variables = image_variables(ROOT / f"docker/{image}.Dockerfile")
        for each in container.get("env", ()):
            if "valueFrom" in each:
                assert each["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}
            variables[each["name"]] = self._edited(each.get("value", self._machine))
        return variables | {"PATH": PATH} | dict(self._site.variables)

    def _edited(self, text: str) -> str:
        for placeholder, value in self._site.edits.items():
            text = text.replace(placeholder, value)
        return text

    def _path(self, volume: Resource) -> Path:
        if claim := volume.get("persistentVolumeClaim"):
            return self._site.claims[claim["claimName"]]
        return self._folder / f"{self._machine}-{volume['name']}"

    def _make(self, volume: Resource) -> None:
        """Makes the volume's folder, which the pod's group may write."""
        path = self._path(volume)
        path.mkdir(exist_ok=True)
        claim = volume.get("persistentVolumeClaim", {"readOnly": True})
        if "emptyDir" in volume or not claim.get("readOnly"):
            os.chown(path, self._user, self._user)
        config = self._site.config_maps.get(volume.get("configMap", {}).get("name"), {})
        for name, text in config.items():
            (path / name).write_text(text)
        sources = volume.get("projected", {}).get("sources", ())
        for secret in (*(each["secret"] for each in sources), volume.get("secret")):
            if secret is None:
                continue
            name = secret.get("name") or secret["secretName"]
            assert name in self._site.secrets or secret.get("optional")
            for key, value in self._site.secrets.get(name, {}).items():
                (path / key).write_text(value)
                (path / key).chmod(0o440)
                os.chown(path / key, 0, self._user)


def _probe(container: Resource) -> list[str]:
    """The command of the startup probe, or one that makes its request in the pod."""
    probe = container["startupProbe"]
    if "exec" in probe:
        return list(probe["exec"]["command"])
    asked = probe["httpGet"]
    (port,) = [p["containerPort"] for p in container["ports"] if p["name"] == asked["port"]]
    url = f"http://127.0.0.1:{port}{asked['path']}"
    return ["python3", "-c", f"import urllib.request; urllib.request.urlopen('{url}')"]


@asynccontextmanager
async def running_pod(
    overlay: str, workload: str, machine: str, site: Site, folder: Path
) -> AsyncIterator[Pod]:
    """A pod of the workload (`Deployment/agentic-worker`) as the overlay builds it. Its containers
    are killed at the end."""
    pod = Pod(dict(pod_specs(render(overlay)))[workload], machine, site, folder)
    try:
        await pod.start()
        yield pod
        pod.check()
    finally:
        pod.kill()
