"""The control routes of running vLLM servers, called on every replica at once.

vLLM serves them with `VLLM_SERVER_DEV_MODE=1` (and `/inference/v1/generate` with
`--enable-scale-out`). The four `*_weight_*` methods are vLLM's own `VLLMWeightSyncClient`
protocol, so its trainer-side transfer backends drive these servers through this class.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trainer.errors import WeightSyncError


class EngineControl:
    """Blocking; its callers run it in a thread beside their event loop."""

    def __init__(self, urls: Sequence[str], *, timeout_s: float = 300.0) -> None:
        if not urls:
            raise WeightSyncError("no engine to send weights to: engine.replicas is 0")
        self.urls = [url.rstrip("/") for url in urls]
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(len(self.urls), thread_name_prefix="engine-control")
        self.next_version = 0
        """What `finish_weight_update` tells the engines that their weights now are."""

    def check(self) -> None:
        """
        Raises:
            WeightSyncError: an engine does not answer, or does not take weights.
        """
        try:
            self.weight_versions()
        except WeightSyncError as error:
            raise WeightSyncError(
                f"engine.urls: {error} (vLLM must run with VLLM_SERVER_DEV_MODE=1, "
                "--enable-scale-out and --weight-transfer-config)"
            ) from error

    def pause(self) -> None:
        """Freezes running requests where they are; they go on after `resume`."""
        self._post_all("/pause?mode=keep")

    def resume(self) -> None:
        self._post_all("/resume")

    def sleep(self) -> None:
        """Frees the GPU: weights go to the host's memory, keys and values are dropped. Nothing is
        in flight. Needs vLLM's `--enable-sleep-mode`, on a GPU."""
        self._post_all("/sleep?level=1")

    def wake_up(self) -> None:
        """Undoes `sleep`."""
        self._post_all("/wake_up")

    def reset_prefix_cache(self) -> None:
        """Also running requests' keys and values are computed anew, under the new weights."""
        answers = self._post_all("/reset_prefix_cache?reset_running_requests=true")
        for url, answer in zip(self.urls, answers, strict=True):
            if not answer.get("success"):
                raise WeightSyncError(
                    f"{url} kept its prefix cache: it would serve the old weights' keys and values"
                )

    def weight_versions(self) -> list[str]:
        return [str(answer["weight_version"]) for answer in self._all("GET", "/weight_info", None)]

    def world_sizes(self) -> list[int]:
        return [int(answer["world_size"]) for answer in self._all("GET", "/get_world_size", None)]

    def prompt_logprobs(self, ids: Sequence[int]) -> list[list[float]]:
        """Per engine: log p(ids[t] | ids[:t]) at temperature 1, for t = 1 … T-1."""
        body = {
            "token_ids": list(ids),
            "sampling_params": {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0},
        }
        answers = self._post_all("/inference/v1/generate", body)
        return [
            [
                float(answer["prompt_logprobs"][t][str(ids[t])]["logprob"])
                for t in range(1, len(ids))
            ]
            for answer in answers
        ]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._post_all("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """An update that a killed trainer left open is ended first: its engine has been paused ever
        since, and gets all of its weights now."""
        list(self._pool.map(self._start_update, self.urls))

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        self._post_all("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        version = str(self.next_version) if weight_version is None else weight_version
        self._post_all("/finish_weight_update", {"weight_version": version})

    def close(self) -> None:
        self._pool.shutdown()

    def _start_update(self, url: str) -> None:
        try:
            self._call("POST", url + "/start_weight_update", None)
        except WeightSyncError as error:
            if "already active" not in str(error):
                raise
            self._call("POST", url + "/finish_weight_update", {"weight_version": "interrupted"})
            self._call("POST", url + "/start_weight_update", None)

    def _post_all(self, path: str, body: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        return self._all("POST", path, body)

    def _all(self, method: str, path: str, body: dict[str, Any] | None) -> list[dict[str, Any]]:
        return list(self._pool.map(lambda url: self._call(method, url + path, body), self.urls))

    def _call(self, method: str, url: str, body: dict[str, Any] | None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(url, data=data, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                answer: dict[str, Any] = json.loads(response.read() or b"{}")
                return answer
        except urllib.error.HTTPError as error:
            said = error.read()[:500].decode(errors="replace")
            raise WeightSyncError(f"{method} {url} answered {error.code}: {said}") from error
        except OSError as error:
            raise WeightSyncError(f"{method} {url} failed: {error}; is the engine up?") from error
