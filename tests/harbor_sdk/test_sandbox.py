"""Real sandboxes: files and processes of a sandbox are visible only inside it."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from harbor_sdk.sandbox import (
    MAX_OUTPUT_BYTES,
    Bind,
    Sandbox,
    SandboxError,
    SandboxSpec,
    SandboxTimeout,
    _kill_inside,
    require_privilege,
)


def _privileged() -> bool:
    try:
        require_privilege()
    except SandboxError:
        return False
    return True


needs_privilege = pytest.mark.skipif(not _privileged(), reason="needs CAP_SYS_ADMIN")


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    sandbox = await Sandbox.start(SandboxSpec(size_mb=64))
    yield sandbox
    await sandbox.stop()


async def _output(sandbox: Sandbox, command: str, **options: object) -> str:
    done = await sandbox.run(command, **options)  # type: ignore[arg-type]
    assert done.return_code == 0, done.stderr.decode()
    return done.stdout.decode().strip()


@needs_privilege
async def test_written_files_are_visible_only_in_their_sandbox(
    sandbox: Sandbox,
) -> None:
    other = await Sandbox.start(SandboxSpec())
    try:
        await _output(sandbox, "echo mine > /etc/private-marker; echo mine > /tmp/private-marker")
        assert await _output(sandbox, "cat /etc/private-marker") == "mine"
        seen = await _output(other, "ls -d /etc/private-marker /tmp/private-marker 2>&1; true")
        assert "mine" not in seen
        assert seen.count("No such file") == 2
        assert not Path("/etc/private-marker").exists()
    finally:
        await other.stop()


@needs_privilege
async def test_sandbox_sees_only_its_own_processes_and_ends_them(tmp_path: Path) -> None:
    sandbox = await Sandbox.start(SandboxSpec(binds=[Bind(tmp_path, tmp_path)]))
    pipe = tmp_path / "alive"
    os.mkfifo(pipe)
    await _output(sandbox, f"(setsid sleep 1000 > {pipe} &) ; true")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    processes = await _output(sandbox, "ls -d /proc/[0-9]*")
    assert f"/proc/{os.getpid()}\n" not in processes + "\n"
    await sandbox.stop()
    assert os.read(reader, 1) == b""  # end of file: no process has the other end open
    os.close(reader)


@needs_privilege
async def test_hidden_folders_are_empty_and_writable_and_binds_are_mounted(
    tmp_path: Path,
) -> None:
    (tmp_path / "secret").write_text("s")
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("k")
    spec = SandboxSpec(
        hidden=[tmp_path],
        binds=[Bind(kept, Path("/logs/agent")), Bind(kept, Path("/readonly"), read_only=True)],
    )
    sandbox = await Sandbox.start(spec)
    try:
        assert await _output(sandbox, f"ls {tmp_path}") == ""
        await _output(sandbox, f"echo x > {tmp_path}/new; echo w > /logs/agent/written")
        assert (kept / "written").read_text() == "w\n"
        assert not (tmp_path / "new").exists()
        assert (await sandbox.run("echo w > /readonly/file")).return_code != 0
        assert (kept / "file").read_text() == "k"
    finally:
        await sandbox.stop()


@needs_privilege
async def test_root_in_sandbox_cannot_mount_make_devices_or_read_our_environment(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTSIDE_SECRET", "do-not-show")
    other = await Sandbox.start(SandboxSpec())
    try:
        for box in (sandbox, other):
            assert (await box.run("mount -t tmpfs x /mnt")).return_code != 0
            assert (await box.run("mknod /tmp/disk b 254 0")).return_code != 0
            shown = await _output(box, "env; cat /proc/1/environ /proc/self/environ | tr '\\0' ' '")
            assert "do-not-show" not in shown
    finally:
        await other.stop()


@needs_privilege
async def test_commands_run_with_given_user_folder_and_variables(sandbox: Sandbox) -> None:
    assert await _output(sandbox, 'echo "$(id -un) $HOME $PWD"') == "root /root /"
    nobody = await _output(
        sandbox, 'id -un; pwd; echo "$A b"', user="nobody", cwd="/tmp", env={"A": "a"}
    )
    assert nobody.split() == ["nobody", "/tmp", "a", "b"]
    assert await _output(sandbox, "id -u; id -g", user=4242) == "4242\n4242"
    unknown = await sandbox.run("true", user="no-such-user")
    assert unknown.return_code == 126
    assert b"'no-such-user' does not exist" in unknown.stderr
    assert (await sandbox.run("echo x > /etc/forbidden", user="nobody")).return_code != 0


@needs_privilege
async def test_timeout_ends_command_but_not_sandbox(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxTimeout, match=r"timed out after 0\.2 seconds"):
        await sandbox.run("sleep 1000 & sleep 1000", timeout_s=0.2)
    assert "sleep" not in await _output(sandbox, "cat /proc/[0-9]*/comm")


@needs_privilege
async def test_cancelled_command_is_ended(sandbox: Sandbox) -> None:
    started = asyncio.Event()

    async def on_output(text: str, stream: str) -> None:
        started.set()

    task = asyncio.create_task(sandbox.run("echo go; sleep 1000", on_output=on_output))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "sleep" not in await _output(sandbox, "cat /proc/[0-9]*/comm")


@needs_privilege
async def test_output_is_kept_up_to_its_bound(sandbox: Sandbox) -> None:
    done = await sandbox.run(f"head -c {MAX_OUTPUT_BYTES + 10_000_000} /dev/zero")
    assert done.return_code == 0
    assert MAX_OUTPUT_BYTES <= len(done.stdout) < MAX_OUTPUT_BYTES + 200_000
    assert done.stdout.endswith(b"bytes]\n")


@needs_privilege
async def test_written_files_are_bounded_by_size_mb(sandbox: Sandbox) -> None:
    done = await sandbox.run("head -c 100M /dev/zero > /var/big")
    assert b"No space left" in done.stderr


@needs_privilege
async def test_stdin_and_stdout_keep_bytes(sandbox: Sandbox, tmp_path: Path) -> None:
    content = os.urandom(3_000_000)
    source, back = tmp_path / "in", tmp_path / "out"
    source.write_bytes(content)
    with source.open("rb") as file:
        await sandbox.run("cat > /srv/in", stdin=file)
    with back.open("wb") as file:
        await sandbox.run("cat /srv/in", stdout=file)
    assert back.read_bytes() == content


@needs_privilege
async def test_sandbox_ends_when_its_owner_is_killed(tmp_path: Path) -> None:
    pipe = tmp_path / "alive"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    script = (
        "import asyncio, pathlib\n"
        "from harbor_sdk.sandbox import *\n"
        "async def main():\n"
        f"    p = pathlib.Path({str(tmp_path)!r})\n"
        "    s = await Sandbox.start(SandboxSpec(binds=[Bind(p, p)]))\n"
        f"    await s.run('setsid sleep 1000 > {pipe} &')\n"
        "    print('ready', flush=True)\n"
        "    await asyncio.sleep(1000)\n"
        "asyncio.run(main())\n"
    )
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE
    )
    assert owner.stdout is not None
    assert await owner.stdout.readline() == b"ready\n"
    owner.kill()
    await owner.wait()
    os.set_blocking(reader, True)
    assert await asyncio.wait_for(asyncio.to_thread(os.read, reader, 1), 10) == b""
    os.close(reader)


@needs_privilege
async def test_stopped_sandbox_refuses_commands(sandbox: Sandbox) -> None:
    await sandbox.stop()
    await sandbox.stop()
    with pytest.raises(SandboxError, match="stopped"):
        await sandbox.run("true", stdin=io.BufferedReader(io.BytesIO()))


def test_missing_privilege_is_named_in_the_error() -> None:
    script = (
        "from harbor_sdk.sandbox import *\n"
        "try: require_privilege()\n"
        "except SandboxError as error: print(error)\n"
    )
    command = [sys.executable, "-c", script]
    if os.geteuid() == 0:
        command = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-all", *command]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "CAP_SYS_ADMIN" in shown


def test_command_that_is_ended_before_it_has_its_session_ends() -> None:
    command = ["bash", "-c", "sleep 60 & echo started; wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"started\n"
        _kill_inside(parent.pid)
        try:
            assert parent.wait(timeout=5) == 0
        finally:
            if parent.returncode is None:
                os.killpg(parent.pid, signal.SIGKILL)
