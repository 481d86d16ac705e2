"""Proxy and agent loop where the system is macOS: what it lacks of Linux is taken away.

Nothing here shows that they run on a Mac; it shows that nothing that only Linux has is needed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.proxy.checkpoint import write_checkpoint

ROOT = Path(__file__).parent.parent
FAKE = r"""
import builtins, ctypes, fcntl, importlib, io, os, pkgutil, resource, select, signal, socket, sys

def modules():
    for package in ("proxy", "agent_loop", "harbor_sdk"):
        for found in pkgutil.walk_packages([package], package + "."):
            if found.name.startswith(NOT_HERE) or found.name.endswith("__main__"):
                continue
            yield found.name

# What needs another package than the base, or Harbor, which has no wheels for this Python.
NOT_HERE = ("agent_loop.extras.other_trainers", "agent_loop.extras.verl", "harbor_sdk.environment",
            "harbor_sdk.trial", "harbor_sdk.local_agents", "proxy.engines.vllm_launch",
            "proxy.extras.binary_route.vllm", "proxy.engines.vllm_key",
            "agent_loop.extras.environments.verifiers_agent")
for name in modules():  # also loads the standard library and other packages, as on Linux
    importlib.import_module(name)
OURS = ("proxy", "agent_loop", "harbor_sdk")
for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
    del sys.modules[name]

LINUX_ONLY = {
    os: ("memfd_create", "pidfd_open", "setns", "unshare", "posix_fallocate", "posix_fadvise",
         "pipe2", "splice", "copy_file_range", "getrandom", "waitid", "getxattr", "setxattr",
         "listxattr", "setresuid", "setresgid", "getresuid", "getresgid", "O_PATH", "O_TMPFILE",
         "O_DIRECT", "P_PIDFD", *(n for n in dir(os) if n.startswith(("sched_get", "sched_set",
         "SCHED_", "eventfd", "EFD_", "MFD_", "SPLICE_", "CLONE_")))),
    signal: ("sigtimedwait", "sigwaitinfo", "pidfd_send_signal", "SIGPWR", "SIGSTKFLT", "SIGRTMIN",
             "SIGRTMAX", "SIGPOLL", "SIGCLD"),
    fcntl: [n for n in dir(fcntl) if n.startswith(("F_OFD_", "F_SEAL_", "F_ADD_SEALS",
            "F_GET_SEALS", "F_SETPIPE", "F_GETPIPE", "F_NOTIFY", "DN_"))],
    resource: ("prlimit", "RLIMIT_SIGPENDING", "RLIMIT_MSGQUEUE", "RLIMIT_NICE", "RLIMIT_RTPRIO"),
    select: [n for n in dir(select) if n.startswith(("epoll", "EPOLL"))],
    socket: [n for n in dir(socket) if n.startswith(("AF_NETLINK", "NETLINK_", "AF_PACKET",
             "AF_VSOCK", "SO_PEERCRED", "SO_BINDTODEVICE", "TCP_KEEPIDLE", "TCP_USER_TIMEOUT",
             "SOCK_CLOEXEC", "SOCK_NONBLOCK", "SO_DOMAIN", "SO_PROTOCOL"))],
}
for module, names in LINUX_ONLY.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
socket.TCP_KEEPALIVE = 4  # a number that this kernel knows

class Library(ctypes.CDLL):
    def __getattr__(self, name):
        if name in ("prctl", "unshare", "setns", "mount", "capset", "umount2", "pidfd_open"):
            raise AttributeError(f"dlsym(RTLD_DEFAULT, {name}): symbol not found")
        return super().__getattr__(name)

ctypes.CDLL = Library

def absent(function):
    def opened(path, *args, **kwargs):
        text = os.fspath(path) if not isinstance(path, int) else ""
        text = text.decode() if isinstance(text, bytes) else text
        if text.startswith(("/proc", "/sys/", "/dev/shm")):
            raise FileNotFoundError(2, "No such file or directory", text)
        return function(path, *args, **kwargs)
    return opened

builtins.open = io.open = absent(io.open)
for name in ("open", "listdir", "readlink", "stat", "scandir", "mkdir"):
    setattr(os, name, absent(getattr(os, name)))
sys.platform = "darwin"
"""
IMPORTS = """
wrong = {}
for name in modules():
    try:
        importlib.import_module(name)
    except Exception as error:
        wrong[name] = f"{type(error).__name__}: {error}"
assert not wrong, wrong
print("imported")
"""
SESSION = r"""
import asyncio
import selectors
from pathlib import Path
import aiohttp
from agent_loop.model_api import chat_completion
from agent_loop.errors import LaunchError
from agent_loop.processes.host import Job, ProcessHost
from agent_loop.remote_agent_config import RemoteAgentConfig
from harbor_sdk.client import AgentRunClient
from proxy import wall
from proxy.machine import landlock
from proxy.admin_key import with_admin_key
from proxy.client import ProxyClient
from proxy.config import load_config
from proxy.testing.scripted_engine import ScriptedEngine, text_script
from proxy.errors import ConfigurationError
from proxy.process import listen
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import load_tokenizer
from proxy.settings.state_folder import default_store
from proxy.machine.secrecy import hide_memory

def refused(kind, words, call):
    try:
        call()
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"not refused: {words}")

def command(sandbox):
    return RemoteAgentConfig.model_validate({"command": {"argv": ["agent"]}, "sandbox": sandbox})

async def main():
    model = Path(sys.argv[1])
    rendering = Rendering(load_tokenizer(model), load_config(model=model).rendering)
    tokenizer = rendering.tokenizer
    script = text_script(lambda prompt: "Hello.", decode=tokenizer.decode,
                         encode=tokenizer.encode, end_ids=tokenizer.stop_token_ids[:1])
    async with ScriptedEngine(script) as engine:
        config = with_admin_key(load_config(model=model, engines=[{"url": engine.url}], port=0))
        for _ in range(2):  # the second time on the store that the first one has made
            async with listen(config) as (app, url, _):
                key = config.admin_key or Path(f"{default_store()}.admin-key").read_text().strip()
                key = key if isinstance(key, str) else key.get_secret_value()
                async with ProxyClient(url, key) as control, aiohttp.ClientSession() as http:
                    session = await control.create_session()
                    headers = {"Authorization": f"Bearer {session.api_key}",
                               "Content-Type": "application/json"}
                    body = {"model": "m", "messages": [{"role": "user", "content": "Hi."}]}
                    said = await chat_completion(http, session.base_url, headers, body, 30)
                    assert said == "Hello."
                    await control.complete(session.trial_id)
                    _, turns = await control.get_turns(session.trial_id)
                    assert len(turns) == 1
                    # The client that reaches Harbor on another machine opens its sockets.
                    async with AgentRunClient(url) as harbor, harbor._http() as there:
                        async with there.get(f"{url}/health") as health:
                            assert health.status == 200

def run(coroutine):
    loop = asyncio.SelectorEventLoop(selectors.PollSelector())
    return loop.run_until_complete(coroutine)

hide_memory()
run(main())
assert "needs Linux, and this is darwin" in wall.missing()
assert landlock.missing()
for sandbox in ("light", "strict", "off"):
    words = "no sandbox here (remote_agent.sandbox)"
    refused(ConfigurationError, words, command(sandbox).check_sandbox)
RemoteAgentConfig.model_validate({"http": {"url": "http://h"}}).check_sandbox()
job = Job(argv=["true"], cwd=Path("."), env={}, log=Path("log"), timeout_s=1)
refused(LaunchError, "need Linux, not darwin", lambda: run(ProcessHost().run(job)))
refused(LaunchError, "need Linux, not darwin", ProcessHost().start)
print("recorded")
"""
RUN = r"""
from proxy.commands.foreground import run_agent
from proxy.errors import ConfigurationError
argv = [sys.executable, "-c", "import sys; sys.exit(7)"]
assert run_agent(argv, dict(os.environ), [], walled=False) == 7
try:
    run_agent(argv, dict(os.environ), [], walled=True)
except ConfigurationError as error:
    assert "needs Linux, and this is darwin" in error.message, error
    print("refused")
"""


def test_modules_are_imported_a_session_is_recorded_and_what_needs_linux_is_refused(
    tmp_path: Path,
) -> None:
    """One process, because it imports everything twice."""
    (tmp_path / "program.py").write_text(FAKE + IMPORTS + SESSION + RUN)
    for name in ("proxy", "agent_loop", "harbor_sdk"):
        (tmp_path / name).symlink_to(ROOT / name)
    done = subprocess.run(
        [sys.executable, "program.py", str(write_checkpoint(tmp_path / "model"))],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["imported", "recorded", "refused"]
