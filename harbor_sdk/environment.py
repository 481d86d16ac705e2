"""A Harbor environment without Docker: `harbor run -e harbor_sdk.environment:LocalEnvironment`.

Each trial has its own `Sandbox` (`harbor_sdk.sandbox` says what it isolates), with Harbor's log
folders mounted as in Docker. Invariant: a trial sees neither the folders of other trials, nor the
tests and solution of its own task before Harbor uploads them, nor this user's home folder.

The sandbox executes the simple instructions of the task's Dockerfile (`harbor_sdk.dockerfile`) and
refuses a Dockerfile with others. `FROM` is this machine's `/`.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from harbor.environments.base import BaseEnvironment, ExecResult, transfer_tar_filter
from harbor.environments.capabilities import (
    EnvironmentCapabilities,
    EnvironmentResourceCapabilities,
)

from harbor_sdk.agents import BASE_URLS
from harbor_sdk.direct_hosts import with_direct_hosts
from harbor_sdk.dockerfile import Build, Copy, Run, read_dockerfile, source_path
from harbor_sdk.sandbox import (
    DEFAULT_PATH,
    Bind,
    Sandbox,
    SandboxSpec,
    SandboxTimeout,
    require_privilege,
)

_DEFAULT_SIZE_MB = 4096


class LocalEnvironmentError(RuntimeError):
    """A step of the environment failed. The message contains the command and its output."""


class LocalEnvironment(BaseEnvironment):  # type: ignore[misc]  # harbor is not installed on 3.11
    """One trial's sandbox, as Harbor uses it. Keyword settings (`--ek`, `environment.kwargs`):

    hidden_paths     more folders that the trial must not see
    bind             folders of this machine, mounted read-only, also below a hidden folder
    path             folders to put first in PATH; Harbor's agents do not install what they find
    inherit_env      variables of this process that commands in the sandbox get (proxies, mirrors)
    run_dockerfile   false: skip RUN and COPY of the Dockerfile, because this machine is prepared
    """

    def __init__(
        self,
        *args: Any,
        hidden_paths: Sequence[str] = (),
        bind: Sequence[str] = (),
        path: Sequence[str] = (),
        inherit_env: Sequence[str] = (),
        run_dockerfile: bool = True,
        **kwargs: Any,
    ) -> None:
        self._hidden_paths = [Path(path) for path in hidden_paths]
        self._own_binds = [Bind(Path(path), Path(path), read_only=True) for path in bind]
        self._path = list(path)
        self._inherit_env = list(inherit_env)
        self._run_dockerfile = run_dockerfile
        self._build = Build()
        self._sandbox: Sandbox | None = None
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        return "local"

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities()

    @classmethod
    def preflight(cls) -> None:
        require_privilege()

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(mounted=True)

    def _validate_definition(self) -> None:
        dockerfile = self.environment_dir / "Dockerfile"
        if (self.environment_dir / "docker-compose.yaml").exists():
            raise LocalEnvironmentError(
                f"{self.environment_dir} has a docker-compose.yaml: a local environment has no "
                "additional services; use the environment docker"
            )
        if dockerfile.exists():
            self._build = read_dockerfile(dockerfile)

    async def start(self, force_build: bool) -> None:
        self._sandbox = await Sandbox.start(
            SandboxSpec(
                binds=[
                    *(
                        Bind(Path(mount["source"]), Path(mount["target"]), "read_only" in mount)
                        for mount in self._mounts
                    ),
                    *self._own_binds,
                ],
                hidden=self._hidden(),
                size_mb=self.task_env_config.storage_mb or _DEFAULT_SIZE_MB,
            )
        )
        await self._checked(f"mkdir -p {shlex.quote(self._workdir)}", cwd="/")
        if self._run_dockerfile:
            for step in self._build.steps:
                await self._carry_out(step)
        await self._upload_environment_dir_after_start()

    async def stop(self, delete: bool) -> None:
        if self._sandbox is not None:
            await self._sandbox.stop()
            self._sandbox = None

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        effective_user = self._resolve_user(user)
        variables = {**self._env(dict(self._build.env)), **(self._merge_env(env) or {})}
        sessions = (variables[name] for name in BASE_URLS if name in variables)
        try:
            done = await self._started.run(
                command,
                cwd=cwd or self._workdir,
                env=with_direct_hosts(variables, *sessions),
                user="root" if effective_user is None else effective_user,
                timeout_s=timeout_sec,
                on_output=self._output_callback(),
            )
        except SandboxTimeout as error:
            raise RuntimeError(str(error)) from error  # what Harbor's own environments raise
        return ExecResult(
            stdout=done.stdout.decode(errors="replace"),
            stderr=done.stderr.decode(errors="replace"),
            return_code=done.return_code,
        )

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        source, target = Path(source_path), shlex.quote(target_path)
        mode = source.stat().st_mode & 0o777
        with await asyncio.to_thread(source.open, "rb") as file:
            await self._checked(
                f'mkdir -p "$(dirname {target})" && cat > {target} && chmod {mode:o} {target}',
                stdin=file,
            )

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        target = shlex.quote(target_dir)
        with tempfile.TemporaryFile() as archive:
            with tarfile.open(fileobj=archive, mode="w", encoding="utf-8") as tar:
                tar.add(source_dir, arcname=".", filter=_owned_by_root)
            archive.seek(0)
            await self._checked(f"mkdir -p {target} && tar -xf - -C {target}", stdin=archive)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        target = Path(target_path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with await asyncio.to_thread(target.open, "wb") as file:
            await self._checked(f"cat -- {shlex.quote(source_path)}", stdout=file)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        target = Path(target_dir)
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile() as archive:
            await self._checked(f"tar -cf - -C {shlex.quote(source_dir)} .", stdout=archive)
            archive.seek(0)
            with tarfile.open(fileobj=archive, encoding="utf-8") as tar:
                tar.extractall(target, filter=transfer_tar_filter)

    @property
    def _started(self) -> Sandbox:
        if self._sandbox is None:
            raise LocalEnvironmentError("the environment has not been started, or has been stopped")
        return self._sandbox

    @property
    def _workdir(self) -> str:
        return self.task_env_config.workdir or self._build.workdir

    def _hidden(self) -> list[Path]:
        """The folders of all trials and tasks (which hold tests and solutions), and the home
        folder."""
        task = self.environment_dir.resolve().parent
        own = [self.trial_paths.trial_dir.parent, task.parent, task, Path.home()]
        paths = [path.resolve() for path in (*own, *self._hidden_paths)]
        return [path for path in paths if path != Path("/")]

    def _env(self, own: dict[str, str]) -> dict[str, str]:
        inherited = {name: os.environ[name] for name in self._inherit_env if name in os.environ}
        path = ":".join([*self._path, own.get("PATH", DEFAULT_PATH)])
        return {**inherited, **own, "PATH": path}

    async def _carry_out(self, step: Run | Copy) -> None:
        if isinstance(step, Run):
            await self._checked(step.command, cwd=step.workdir, env=step.env)
            return
        for source in step.sources:
            path = source_path(self.environment_dir, source)
            if path.is_dir():
                await self.upload_dir(path, step.target)
            else:
                await self.upload_file(
                    path, f"{step.target}/{path.name}" if step.is_dir else step.target
                )

    async def _checked(
        self,
        command: str,
        *,
        cwd: str = "/",
        env: dict[str, str] | None = None,
        stdin: BinaryIO | None = None,
        stdout: BinaryIO | None = None,
    ) -> None:
        """Runs the command as root. Raises LocalEnvironmentError with the end of its output."""
        done = await self._started.run(
            command, cwd=cwd, env=self._env(env or {}), stdin=stdin, stdout=stdout
        )
        if done.return_code != 0:
            output = (done.stdout + done.stderr).decode(errors="replace")[-2000:].strip()
            raise LocalEnvironmentError(
                f"{command!r} failed with exit code {done.return_code}: {output}"
            )


def _owned_by_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member
