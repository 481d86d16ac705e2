"""Requests to engines that die, refuse, or answer what cannot be used."""

from __future__ import annotations

import fcntl
import os
import resource
import threading
import time

import pytest

from tests.trainer.fake_engine import fake_engine
from trainer.errors import WeightSyncError
from trainer.weight_sync.control import EngineControl, is_readable


def with_key(url: str) -> str:
    return url.replace("http://", "http://:secret@")


def test_engine_that_dies_while_an_update_waits_ends_the_wait_with_its_url_and_no_key() -> None:
    with fake_engine() as (engine, url):
        engine.never_answers = "/update_weights"
        control = EngineControl([with_key(url)])

        def die() -> None:
            engine.waiting.wait()
            engine.is_dead = True

        death = threading.Thread(target=die)
        death.start()
        started = time.monotonic()
        with pytest.raises(WeightSyncError) as caught:
            control.update_weights({})
        death.join()
        control.close()
        assert time.monotonic() - started < 20
    message = str(caught.value)
    assert message.startswith(f"{url}: the engine died while POST /update_weights waited")
    assert "start it again, and then the run" in message
    assert "secret" not in message


def test_slow_engine_that_is_healthy_is_waited_for() -> None:
    with fake_engine() as (engine, url):
        engine.never_answers = "/finish_weight_update"
        control = EngineControl([url])
        control.next_version = 3

        def release() -> None:
            while "/health" not in engine.calls:
                engine.waiting.wait()
            engine.released.set()

        slow = threading.Thread(target=release)
        slow.start()
        control.finish_weight_update()
        slow.join()
        assert control.weight_versions() == ["3"]
        control.close()


def test_engine_that_is_not_there_is_named_without_its_key() -> None:
    with fake_engine() as (_, url):
        pass
    control = EngineControl([with_key(url)])
    with pytest.raises(WeightSyncError, match=f"POST {url}/wake_up.* failed: .*is the engine up"):
        control.resume()
    control.close()


def test_engine_that_loads_keys_and_values_is_resumed_until_it_can_forget_them() -> None:
    """A paused vLLM does not end such a load, and refuses the reset until it has ended."""
    with fake_engine() as (engine, url):
        engine.refuses_resets = 2
        control = EngineControl([url])
        control.pause()
        control.reset_caches()
        control.close()
    assert engine.calls == [
        *("/sleep", "/reset_prefix_cache", "/wake_up"),
        *("/sleep", "/reset_prefix_cache", "/wake_up"),
        *("/sleep", "/reset_prefix_cache"),
    ]


def test_engine_that_keeps_old_keys_and_values_is_refused() -> None:
    with fake_engine() as (engine, url):
        engine.resets = False
        control = EngineControl([url])
        with pytest.raises(WeightSyncError, match="did not reset its prefix cache"):
            control.reset_caches()
        control.close()


def test_features_of_images_are_forgotten_if_the_tower_is_trained() -> None:
    """After keys and values, because those of running requests are computed from features."""
    with fake_engine() as (engine, url):
        control = EngineControl([url])
        control.reset_caches(tower=True)
        control.close()
    assert engine.calls == ["/reset_prefix_cache", "/reset_encoder_cache"]


def test_an_answer_is_awaited_on_any_descriptor() -> None:
    """`select` knows those below 1,024 alone, and a trainer has two pipes for each agent."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    reads, writes = os.pipe()
    high = fcntl.fcntl(reads, fcntl.F_DUPFD, 1100)
    try:
        assert high >= 1100
        assert not is_readable(high, 0.01)
        os.write(writes, b"x")
        assert is_readable(high, 0.01)
    finally:
        for each in (reads, writes, high):
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
