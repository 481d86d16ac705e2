"""The control routes of running vLLM servers, called on every replica at once.

vLLM serves them with `VLLM_SERVER_DEV_MODE=1` (and `/inference/v1/generate` with
`--enable-scale-out`). The four `*_weight_*` methods are vLLM's own `VLLMWeightSyncClient`
protocol, so its trainer-side transfer backends drive these servers through this class.

Invariant: if an engine dies while a request waits for it, the wait ends within seconds, even if
the server continues without its engine process and never answers.
"""

from __future__ import annotations

import http.client
import json
import select
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing
from http import HTTPStatus
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from proxy.engines.address import EngineAddress
from proxy.engines.vllm_pause import LOAD_S, LOADS, PAUSE, RESET_CACHES, RESUME
from trainer.errors import WeightSyncError

RESET_FEATURES = "/reset_encoder_cache"

T = TypeVar("T")
HEALTH_INTERVAL_S = 1.0
"""How often a waiting request asks whether its engine is alive."""
_HELD = "held_dtypes"
"""A method of workers that run this project's plug-in. It is called only if each has it: vLLM's
executor would leave the errors of several workers in its queues (`vllm_responses.py`)."""
HEALTH_TIMEOUT_S = 10.0
"""An engine that does not answer within this time may be busy; it is not taken for dead."""


class EngineControl:
    """Calls the control routes of all replicas. Its methods block: call them in a thread if an
    event loop is running."""

    def __init__(self, urls: Sequence[str], *, timeout_s: float = 300.0) -> None:
        """`urls` may carry the engines' keys, see `proxy.engines.address`."""
        if not urls:
            raise WeightSyncError("no engine to send weights to: engine.replicas is 0")
        addresses = [EngineAddress.parse(url) for url in urls]
        self.urls = [address.url for address in addresses]
        self._keys = {address.url: address.headers for address in addresses}
        self.timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(  # two requests to each engine at a time
            2 * len(self.urls), thread_name_prefix="engine-control"
        )
        self.next_version = 0
        """The version that `finish_weight_update` sends to the engines."""

    def check(self) -> None:
        """Checks that every engine answers and accepts weights.

        Raises:
            WeightSyncError: an engine does not.
        """
        try:
            self.weight_versions()
        except WeightSyncError as error:
            raise WeightSyncError(
                f"engine.urls: {error} (vLLM must run with VLLM_SERVER_DEV_MODE=1, "
                "--enable-scale-out and --weight-transfer-config)"
            ) from error

    def check_alive(self) -> None:
        """Raises WeightSyncError: an engine has died."""
        for url in self.urls:
            if (why := _death(url, self._keys[url])) is not None:
                raise _died(url, "it staged weights", why)

    def pause(self) -> None:
        """Freezes running requests; they continue after `resume`."""
        self._post_all(PAUSE)

    def resume(self) -> None:
        self._post_all(RESUME)

    def sleep(self) -> None:
        """Frees the GPU: weights move to the host's memory, and keys and values are deleted. No
        request may be in flight. Needs a GPU and vLLM's `--enable-sleep-mode`."""
        self._post_all("/sleep?level=1")

    def wake_up(self) -> None:
        """Undoes `sleep`."""
        self._post_all("/wake_up")

    def reset_caches(self, *, tower: bool = False) -> None:
        """Deletes all keys and values of the paused engines, also those in a host tier; the ones of
        running requests are computed again. An engine that loads keys and values from its host tier
        refuses, and loads nothing while it is paused; it samples until the load has ended. `tower`:
        also the features of images, which are kept by the image alone."""
        list(self._pool.map(self._reset_caches, self.urls))
        if tower:  # no running request has any, since its keys and values are deleted
            self._post_all(RESET_FEATURES)

    def weight_versions(self) -> list[str]:
        return [str(answer["weight_version"]) for answer in self._all("GET", "/weight_info", None)]

    def world_sizes(self) -> list[int]:
        return [int(answer["world_size"]) for answer in self._all("GET", "/get_world_size", None)]

    def load_adapter(self, name: str, folder: Path) -> None:
        """Makes every engine serve the LoRA adapter in this folder under this name, also while it
        samples. An engine that has an adapter of this name keeps it."""
        list(self._pool.map(lambda url: self._load_adapter(url, name, folder), self.urls))

    def unload_adapters(self, chosen: Callable[[str], bool]) -> None:
        """Makes every engine refuse new calls of the adapters whose names are `chosen`. Running
        calls continue."""
        list(self._pool.map(lambda url: self._unload_adapters(url, chosen), self.urls))

    def prompt_logprobs(self, ids: Sequence[int], model: str | None = None) -> list[list[float]]:
        """For each engine, log p(ids[t] | ids[:t]) at temperature 1, for t = 1 … T-1. T may be the
        engine's whole context. `model` is the name of an adapter; None: the engine's own
        weights."""
        # The engine refuses a prompt without room for a token after it, so the last id is scored as
        # that token. Listed twice, because vLLM's first result is the token that it sampled.
        last = {"logprob_token_ids": [ids[-1]] * 2, "logprobs": 2}
        body: dict[str, Any] = {
            "token_ids": list(ids[:-1]),
            "sampling_params": {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, **last},
        }
        if model is not None:
            body["model"] = model
        return [_scored(ids, answer) for answer in self._post_all("/inference/v1/generate", body)]

    def held_dtypes(self, described: str) -> list[Any]:
        """What each worker of each engine reports in which type it holds the `described` weights
        (`vllm_dtypes.py`); None: it cannot report that."""
        able = [_HELD in attributes for attributes in self.call_workers("__dir__")]
        return self.call_workers(_HELD, described) if all(able) else [None]

    def call_workers(self, method: str, *arguments: str) -> list[Any]:
        """What a method of every worker of every engine returns."""
        called = {"method": method, "args": list(arguments)}
        answers = self._post_all("/collective_rpc", called)
        return [result for answer in answers for result in answer["results"]]

    def tokenize(self, text: str) -> list[list[int]]:
        """For each engine, the ids of the text, in which special tokens are recognised."""
        body = {"prompt": text, "add_special_tokens": False}
        return [list(answer["tokens"]) for answer in self._post_all("/tokenize", body)]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Where workers have ranks, those of the first engine begin at the given `rank_offset`, and
        those of each further engine after the ones of the engine before it."""
        infos = [init_info] * len(self.urls)
        if (first := init_info.get("rank_offset")) is not None:
            offsets = accumulate(self.world_sizes(), initial=first)
            infos = [init_info | {"rank_offset": offset} for offset in offsets]
        self._each(self._init_transfer, self.urls, infos)

    def start_weight_update(self) -> None:
        """Starts an update. If a killed trainer left an update open, ends that one first: its
        engine is still paused, and now receives all of its weights."""
        list(self._pool.map(self._start_update, self.urls))

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        self._post_all("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        version = str(self.next_version) if weight_version is None else weight_version
        self._post_all("/finish_weight_update", {"weight_version": version})

    def lost_in_update(self, limit_s: float) -> WeightSyncError | None:
        """The error for an engine that is found dead within `limit_s`; None if all seem alive. An
        engine whose worker has died still seems alive for a moment."""
        deadline = time.monotonic() + limit_s
        while True:
            for url in self.urls:
                if (why := _death(url, self._keys[url])) is not None:
                    return _died(url, "it received weights", why)
            if time.monotonic() > deadline:
                return None
            time.sleep(HEALTH_INTERVAL_S)

    def close(self) -> None:
        self._pool.shutdown()

    def _reset_caches(self, url: str) -> None:
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                answer = self._call("POST", url, RESET_CACHES, None)
                break
            except WeightSyncError as error:
                if LOADS not in str(error) or time.monotonic() > deadline:
                    raise
            self._call("POST", url, RESUME, None)
            time.sleep(LOAD_S)
            self._call("POST", url, PAUSE, None)
        if not answer.get("success"):
            raise WeightSyncError(
                f"{url} did not reset its prefix cache: it would use keys and values of the "
                "old weights; restart this engine"
            )

    def _init_transfer(self, url: str, init_info: dict[str, Any]) -> None:
        self._call("POST", url, "/init_weight_transfer_engine", {"init_info": init_info})

    def _start_update(self, url: str) -> None:
        try:
            self._call("POST", url, "/start_weight_update", None)
        except WeightSyncError as error:
            if "already active" not in str(error):
                raise
            self._call("POST", url, "/finish_weight_update", {"weight_version": "interrupted"})
            self._call("POST", url, "/start_weight_update", None)

    def _load_adapter(self, url: str, name: str, folder: Path) -> None:
        if name not in self._adapters(url):
            body = {"lora_name": name, "lora_path": str(folder)}
            self._call("POST", url, "/v1/load_lora_adapter", body)

    def _unload_adapters(self, url: str, chosen: Callable[[str], bool]) -> None:
        for name in filter(chosen, self._adapters(url)):
            self._call("POST", url, "/v1/unload_lora_adapter", {"lora_name": name})

    def _adapters(self, url: str) -> list[str]:
        """The names of the engine's adapters."""
        models = self._call("GET", url, "/v1/models", None)["data"]
        return [model["id"] for model in models if model.get("parent") is not None]

    def _post_all(self, path: str, body: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        return self._all("POST", path, body)

    def _all(self, method: str, path: str, body: dict[str, Any] | None) -> list[dict[str, Any]]:
        return self._each(lambda url: self._call(method, url, path, body), self.urls)

    def _each(self, call: Callable[..., T], *arguments: Iterable[Any]) -> list[T]:
        """Calls every engine at once. An error of one is raised at once: the others may wait for
        it."""
        calls = [self._pool.submit(call, *each) for each in zip(*arguments, strict=False)]
        done, _ = wait(calls, return_when=FIRST_EXCEPTION)
        for failed in (each for each in done if each.exception() is not None):
            failed.result()
        return [each.result() for each in calls]

    def _call(
        self, method: str, engine: str, path: str, body: dict[str, Any] | None
    ) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **self._keys[engine]}
        try:
            with closing(_connection(engine, self.timeout_s)) as connection:
                connection.request(method, urlsplit(engine).path + path, data, headers)
                self._await_answer(connection, method, engine, path)
                response = connection.getresponse()
                said = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise WeightSyncError(
                f"{method} {engine}{path} failed: {error}; is the engine up?"
            ) from error
        if response.status >= HTTPStatus.BAD_REQUEST:
            words = said[:500].decode(errors="replace")
            raise WeightSyncError(f"{method} {engine}{path} answered {response.status}: {words}")
        is_json = response.headers.get_content_type() == "application/json"
        answer: dict[str, Any] = json.loads(said or b"{}") if is_json else {}
        return answer

    def _await_answer(
        self, connection: http.client.HTTPConnection, method: str, engine: str, path: str
    ) -> None:
        """Returns when the answer begins.

        Raises:
            WeightSyncError: the engine has died, or has not answered in time.
        """
        deadline = time.monotonic() + self.timeout_s
        while not is_readable(connection.sock.fileno(), HEALTH_INTERVAL_S):
            if (why := _death(engine, self._keys[engine])) is not None:
                raise _died(engine, f"{method} {path} waited for it", why)
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer within {self.timeout_s:g} s")


def is_readable(fd: int, wait_s: float) -> bool:
    """Whether something can be read within this time; of any descriptor, also above 1,024."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(1000 * wait_s))


def _scored(ids: Sequence[int], answer: Mapping[str, Any]) -> list[float]:
    """The log-probabilities of all ids but the first, from vLLM's answer to a scoring call."""
    prompt, (sampled,) = answer["prompt_logprobs"], answer["choices"][0]["logprobs"]["content"]
    scores = [prompt[t][str(ids[t])]["logprob"] for t in range(1, len(ids) - 1)]
    listed = {entry["token_id"]: entry["logprob"] for entry in sampled["top_logprobs"]}
    return [float(score) for score in (*scores, listed[ids[-1]])]


def _connection(engine: str, timeout_s: float) -> http.client.HTTPConnection:
    parts = urlsplit(engine)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname or "", parts.port, timeout=timeout_s)


def _died(engine: str, during: str, why: str) -> WeightSyncError:
    return WeightSyncError(
        f"{engine}: the engine died while {during} ({why}); start it again, and then the run, "
        "which continues from its last checkpoint"
    )


def _death(engine: str, headers: Mapping[str, str]) -> str | None:
    """The evidence that the engine is dead; None if it is alive or too busy to answer."""
    try:
        with closing(_connection(engine, HEALTH_TIMEOUT_S)) as connection:
            connection.request("GET", urlsplit(engine).path + "/health", headers=dict(headers))
            status = connection.getresponse().status
    except TimeoutError:
        return None
    except (OSError, http.client.HTTPException) as error:
        return f"GET /health failed: {error}"
    dead = status == HTTPStatus.SERVICE_UNAVAILABLE
    return f"GET /health answered {status}" if dead else None
