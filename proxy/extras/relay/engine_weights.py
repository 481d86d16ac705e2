"""Gives a vLLM on this machine new weights from a local file, by its control routes.

vLLM serves them with `VLLM_SERVER_DEV_MODE=1`, and takes weights from a file with our plug-in (the
package `agentic-rl` in its environment) and `--weight-transfer-config '{"backend": "shm"}'`: its
workers map the file, check the digest of every byte and load it (`trainer.weight_sync`). Adapters
need no plug-in.

Invariant: the engine reports a version only if it has all of that version's weights. From the first
weight that may have changed until then it samples nothing, also if this process ends in between.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import orjson

from proxy.engines.upstream import Upstream
from proxy.engines.vllm_pause import LOAD_S, LOADS, PAUSE, RESET_CACHES, RESUME
from proxy.errors import EngineError, ProxyError
from proxy.extras.relay.weights.publication import ProbeScores
from proxy.extras.relay.weights.pull import LocalWeights

CONTROL_TIMEOUT_S = 600.0
"""Seconds that a step of an update may take: loading hundreds of GiB from disk is slow."""
_HELD = "held_dtypes"
_PIPE_BYTES = 1 << 16
_FOR_WEIGHTS = (
    "to take weights, this vLLM needs VLLM_SERVER_DEV_MODE=1, the package agentic-rl, and "
    '--weight-transfer-config \'{"backend": "shm"}\''
)
_FOR_ADAPTERS = (
    "to take adapters, this vLLM needs VLLM_SERVER_DEV_MODE=1, "
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, --enable-lora and --max-lora-rank"
)


class _Report(msgspec.Struct):
    """What a worker of the engine writes when it has staged weights, or cannot."""

    digest: str
    reason: str


class EngineWeights:
    """Example:
    engine = EngineWeights("http://127.0.0.1:8001")
    paused_s = await engine.load(local)
    """

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self._upstream = Upstream(url, api_key=api_key)

    async def label(self, timeout_s: float = CONTROL_TIMEOUT_S) -> str:
        """The engine's label of its weights: a version, or FIRST_LABEL. Raises EngineError."""
        answer = await self._get("/weight_info", timeout_s)
        return str(answer.get("weight_version") if isinstance(answer, dict) else None)

    async def held_dtypes(
        self, weights: Sequence[tuple[str, str, tuple[int, ...]]]
    ) -> tuple[str | None, ...] | None:
        """The type in which the engine holds each weight, if its workers can report it: None for a
        weight that it does not load, and the trained type where workers differ. A weight is its
        name, trained type and shape.

        Raises:
            EngineError: it does not answer.
        """
        able = await self._workers("__dir__")
        if not all(_HELD in attributes for attributes in able):
            return None
        reports = await self._workers(_HELD, orjson.dumps(weights).decode())
        if not all(isinstance(each, list) and len(each) == len(weights) for each in reports):
            return None
        held = []
        for (_, trained, _), *found in zip(weights, *reports, strict=True):
            types = {each for each in found if each is not None}
            held.append(trained if len(types) > 1 else next(iter(types), None))
        return tuple(held)

    async def load(self, local: LocalWeights) -> float:
        """Returns for how many seconds the engine did not sample. Its running calls continue, and
        report from which token on they have the new version.

        Raises:
            EngineError: the engine refused the weights, or was lost; if it has begun to change
                them, it stays paused.
        """
        written = {
            "path": str(local.path.absolute()),
            "size_bytes": local.size_bytes,
            "digest": local.manifest.digest,
        }
        await self._stage(written)
        await self._post(PAUSE)
        paused = time.perf_counter()
        await self._reset_caches()
        await self._start_update()
        await self._post("/update_weights", {"update_info": written})
        await self._post("/finish_weight_update", {"weight_version": str(local.manifest.version)})
        await self._post(RESUME)
        return time.perf_counter() - paused

    async def adapters(self, timeout_s: float = CONTROL_TIMEOUT_S) -> set[str]:
        """The names of the adapters for which the engine accepts calls. Raises EngineError."""
        answer = await self._get("/v1/models", timeout_s)
        try:
            return {each["id"] for each in answer["data"] if each.get("parent") is not None}
        except (KeyError, TypeError, AttributeError) as error:
            raise self._upstream.fault(f"sent unreadable models: {error!r}") from error

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Makes the engine serve the adapter, also while it samples; one of this name stays.

        Raises:
            EngineError: the engine refused it.
        """
        if name not in await self.adapters():
            body = {"lora_name": name, "lora_path": str(folder)}
            await self._post("/v1/load_lora_adapter", body, needs=_FOR_ADAPTERS)

    async def unload_adapters(self, chosen: Callable[[str], bool]) -> None:
        """Makes the engine refuse new calls of the adapters whose names are `chosen`. Running calls
        continue. Raises EngineError."""
        for name in filter(chosen, await self.adapters()):
            await self._post("/v1/unload_lora_adapter", {"lora_name": name}, needs=_FOR_ADAPTERS)

    async def difference(self, probe: ProbeScores, adapter: str = "") -> float:
        """Mean |Δ log p| of the engine and the trainer; without an adapter, of the engine's own
        weights. Raises EngineError."""
        body = {
            **({"model": adapter} if adapter else {}),
            "token_ids": probe.ids,
            "sampling_params": {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0},
        }
        answer = await self._post("/inference/v1/generate", body)
        try:
            scores = answer["prompt_logprobs"]
            served = [
                float(scores[at][str(probe.ids[at])]["logprob"]) for at in range(1, len(probe.ids))
            ]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise self._upstream.fault(f"did not score the probe: {error!r}") from error
        gaps = [abs(a - b) for a, b in zip(served, probe.logprobs, strict=True)]
        return sum(gaps) / len(gaps)

    async def close(self) -> None:
        await self._upstream.close()

    async def _stage(self, written: dict[str, Any]) -> None:
        """Returns when every worker of the engine has staged the weights, or says that it loads
        them during the pause."""
        workers = int((await self._get("/get_world_size"))["world_size"])
        with _pipe(Path(written["path"]).parent) as (path, descriptor):
            init = {"init_info": written | {"report": str(path)}}
            await self._post("/init_weight_transfer_engine", init)
            try:
                async with asyncio.timeout(CONTROL_TIMEOUT_S):
                    await reports(descriptor, written["digest"], workers)
            except TimeoutError as error:
                raise EngineError(
                    f"{self._upstream.url} has not staged the weights within "
                    f"{CONTROL_TIMEOUT_S:g} s"
                ) from error

    async def _start_update(self) -> None:
        """Starts an update. If a killed worker left one open, ends that one first."""
        try:
            await self._post("/start_weight_update")
        except ProxyError as error:
            if "already active" not in error.message:
                raise
            await self._post("/finish_weight_update", {"weight_version": "interrupted"})
            await self._post("/start_weight_update")

    async def _reset_caches(self) -> None:
        """Deletes all keys and values of the paused engine, as soon as it loads none from its host
        tier; for that, it may sample again meanwhile."""
        deadline = time.monotonic() + CONTROL_TIMEOUT_S
        while True:
            try:
                reset = await self._post(RESET_CACHES)
                break
            except EngineError as error:
                if LOADS not in error.message or time.monotonic() > deadline:
                    raise
            await self._post(RESUME)
            await asyncio.sleep(LOAD_S)
            await self._post(PAUSE)
        if not isinstance(reset, dict) or not reset.get("success"):
            raise EngineError(
                f"{self._upstream.url} did not reset its prefix cache: it would use keys and values"
                " of the old weights; restart this engine"
            )

    async def _workers(self, method: str, *arguments: str) -> list[Any]:
        """What a method of every worker of the engine returns."""
        answer = await self._post("/collective_rpc", {"method": method, "args": arguments})
        results: list[Any] = answer["results"]
        return results

    async def _get(self, path: str, timeout_s: float = CONTROL_TIMEOUT_S) -> Any:
        return await self._upstream.get(path, timeout_s=timeout_s, absent=())

    async def _post(self, path: str, body: Any = None, *, needs: str = "") -> Any:
        """Raises EngineError, which names the flags that the route `needs` if it is missing."""
        data = b"" if body is None else orjson.dumps(body)
        try:
            answer = await self._upstream.post(path, data, timeout_s=CONTROL_TIMEOUT_S)
        except ProxyError as error:
            if " answered 404" in error.message or "weight transfer" in error.message.lower():
                raise EngineError(f"{error.message}; {needs or _FOR_WEIGHTS}") from error
            raise EngineError(error.message) from error
        try:
            return orjson.loads(answer) if answer else {}
        except orjson.JSONDecodeError:
            return {}


@contextmanager
def _pipe(shared: Path) -> Iterator[tuple[Path, int]]:
    """A pipe to which the engine's workers write their reports. It is in a folder that they see
    under the same path; the engine may be in a container with other temporary files."""
    with tempfile.TemporaryDirectory(prefix="reports-", dir=shared) as folder:
        path = Path(folder, "reports")
        os.mkfifo(path)
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)  # never at its end
        try:
            yield path, descriptor
        finally:
            os.close(descriptor)


async def reports(descriptor: int, digest: str, workers: int) -> None:
    """Returns when so many workers have reported about the weights with this digest."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, readable.set)
    try:
        rest, count = b"", 0
        while count < workers:
            await readable.wait()
            readable.clear()
            try:
                data = os.read(descriptor, _PIPE_BYTES)
            except BlockingIOError:
                continue  # the loop had noted again what the last read has taken
            *lines, rest = (rest + data).split(b"\n")
            found = [msgspec.json.decode(line, type=_Report) for line in lines]
            count += sum(each.digest == digest for each in found)
    finally:
        loop.remove_reader(descriptor)
