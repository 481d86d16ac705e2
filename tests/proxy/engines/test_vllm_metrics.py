"""The size of the cache and the load that a vLLM reports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from proxy.engines.upstream import MAX_TEXT_BYTES, Upstream
from proxy.engines.vllm import VllmEngine
from proxy.engines.vllm_metrics import METRICS, SAMPLE, cache_tokens, load_details
from proxy.errors import EngineError
from proxy.testing.scripted_engine import ScriptedEngine

SIZE = 'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0\n'
LOAD = 'vllm:num_requests_waiting{engine="0"} 3.0\n'


class Pages:
    """What `/metrics` of a vLLM answers, and when."""

    def __init__(self) -> None:
        self.page = SIZE + LOAD
        self.status = 200
        self.asked = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        if request.path != METRICS:
            return web.Response()
        self.asked.set()
        await self.may_answer.wait()
        return web.Response(text=self.page, status=self.status)


@pytest.fixture
async def server() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(lambda _: [5]) as engine:
        yield engine


@pytest.fixture
async def pages() -> AsyncIterator[Pages]:
    pages = Pages()
    app = web.Application()
    app.router.add_get("/{path:.*}", pages.answer)
    async with TestServer(app) as server:
        pages.url = str(server.make_url("")).rstrip("/")
        yield pages


@pytest.fixture
async def engine(pages: Pages) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(pages.url)
    yield engine
    await engine.close()


@pytest.mark.parametrize(
    "page", [LOAD, "other 1.0\n", ""], ids=["load-only", "other-only", "empty"]
)
async def test_size_of_the_cache_stays_known_if_a_page_lacks_it(
    pages: Pages, engine: VllmEngine, page: str
) -> None:
    await engine.check()
    assert engine.info.cache_tokens == 1600
    whole, pages.page = pages.page, page
    await engine.check()
    assert engine.info.cache_tokens == 1600
    assert engine.info.details == load_details(page)
    pages.page = whole.replace('"100"', '"50"')  # restarted between two checks
    await engine.check()
    assert engine.info.cache_tokens == 800
    assert engine.info.details == {"queued": 3}


async def test_load_stays_known_while_the_next_check_reads_it(
    pages: Pages, engine: VllmEngine
) -> None:
    await engine.check()
    pages.asked.clear()
    pages.may_answer.clear()
    check = asyncio.create_task(engine.check())
    await pages.asked.wait()
    assert engine.info.details == {"queued": 3}
    pages.page = LOAD.replace("3.0", "4.0")
    pages.may_answer.set()
    await check
    assert engine.info.details == {"queued": 4}


async def test_load_is_unknown_after_metrics_that_cannot_be_read(
    pages: Pages, engine: VllmEngine
) -> None:
    await engine.check()
    pages.status = 500
    await engine.check()
    assert engine.info.healthy
    assert engine.info.details == {}
    assert engine.info.cache_tokens == 1600


async def test_load_of_an_engine_that_failed_its_check_is_unknown(
    server: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def text(_: Upstream, path: str, *, timeout_s: float) -> str:
        return LOAD

    monkeypatch.setattr(Upstream, "text", text)
    engine = VllmEngine(server.url)
    await engine.check()
    assert engine.info.details == {"queued": 3}
    server.healthy = False
    with pytest.raises(EngineError):
        await engine.check()
    assert engine.info.details == {}
    await engine.close()


async def test_metrics_longer_than_the_bound_are_not_read(pages: Pages, engine: VllmEngine) -> None:
    pages.page = (SIZE + LOAD).ljust(MAX_TEXT_BYTES, "\n")
    await engine.check()
    assert engine.info.details == {"queued": 3}
    pages.page += "\n"
    await engine.check()
    assert engine.info.healthy
    assert engine.info.details == {}
    upstream = Upstream(pages.url)
    with pytest.raises(EngineError, match=f"sent more than {MAX_TEXT_BYTES} bytes at /metrics"):
        await upstream.text(METRICS, timeout_s=30.0)
    await upstream.close()


def test_only_the_samples_that_are_used_are_parsed() -> None:
    others = "".join(
        f'vllm:{name}{{engine="0",le="{bound}.0"}} {bound}.0\n'
        for name in ("e2e_request_latency_seconds_bucket", "num_requests_waiting_by_reason")
        for bound in range(50)
    )
    page = others + SIZE + others + LOAD + others
    assert [match.group() for match in SAMPLE.finditer(page)] == [
        "\n" + SIZE.rstrip(),
        "\n" + LOAD.rstrip(),
    ]


async def test_vllm_reports_the_size_of_its_cache_until_it_fails_its_check(
    server: ScriptedEngine,
) -> None:
    engine = VllmEngine(server.url)
    await engine.check()
    assert engine.info.cache_tokens is None
    server.cache_tokens = 640
    await engine.check()
    assert engine.info.cache_tokens == 640
    server.healthy = False
    with pytest.raises(EngineError):
        await engine.check()
    assert engine.info.cache_tokens is None
    await engine.close()


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 500, 501, 503])
async def test_engine_that_does_not_send_its_metrics_is_healthy(
    server: ScriptedEngine, status: int
) -> None:
    server.without_metrics = status
    engine = VllmEngine(server.url)
    await engine.check()
    assert engine.info.healthy
    assert engine.info.cache_tokens is None
    await engine.close()


async def test_metrics_without_the_size_of_the_cache_are_read_once_until_a_check_fails(
    server: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []

    async def text(_: Upstream, path: str, *, timeout_s: float) -> str:
        reads.append(path)
        return "other 1.0"

    monkeypatch.setattr(Upstream, "text", text)
    engine = VllmEngine(server.url)
    for _ in range(2):
        await engine.check()
    assert len(reads) == 1
    server.healthy = False
    with pytest.raises(EngineError):
        await engine.check()
    server.healthy = True
    await engine.check()
    assert len(reads) == 2
    await engine.close()


@pytest.mark.parametrize(
    ("metrics", "tokens"),
    [
        (
            'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0\n'
            'vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="50"} 1.0\n',
            2400,
        ),
        ('vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0\n', None),
        ("# HELP vllm:cache_config_info Information\nother 1.0\n", None),
        ("", None),
    ],
    ids=["two-ranks", "unknown", "missing", "empty"],
)
def test_cache_size_in_vllm_metrics(metrics: str, tokens: int | None) -> None:
    assert cache_tokens(metrics) == tokens


def tiered(
    *, gib: str, blocks: int = 64, stored: str = "1.572864e+07", storing: str = "0.0"
) -> str:
    """As a vLLM 0.32 with a host tier sent it after it had stored 120 blocks of 131,072 bytes."""
    return (
        f'vllm:cache_config_info{{block_size="32",engine="0",kv_offloading_backend="native",'
        f'kv_offloading_size="{gib}",num_cpu_blocks="None",num_gpu_blocks="{blocks}",'
        'user_specified_block_size="True"} 1.0\n'
        f'vllm:kv_offload_store_bytes_total{{engine="0",model_name="m"}} {stored}\n'
        'vllm:kv_offload_store_bytes_created{engine="0",model_name="m"} 1.79e+09\n'
        'vllm:kv_offload_cpu_allocation_size_bucket{engine="0",le="1.0"} 9.0\n'
        'vllm:kv_offload_cpu_allocation_size_count{engine="0"} 6.0\n'
        'vllm:kv_offload_cpu_allocation_size_sum{engine="0"} 120.0\n'
        f'vllm:kv_offload_cpu_cache_write_usage_perc{{engine="0"}} {storing}\n'
    )


@pytest.mark.parametrize(
    ("metrics", "tokens"),
    [
        (tiered(gib="0.5"), 4096 * 32),
        (tiered(gib="1"), 8192 * 32),
        (tiered(gib="0.5", blocks=5000), 5000 * 32),
        (tiered(gib="0.5", stored="7.86432e+06", storing=str(60 / 4096)), 4096 * 32),
        (tiered(gib="0.5", stored="0.0"), 64 * 32),
        (tiered(gib="None"), 64 * 32),
    ],
    ids=["half-a-GiB", "a-GiB", "larger-cache", "stores-not-ended", "nothing-stored", "no-tier"],
)
def test_cache_size_counts_the_host_tier(metrics: str, tokens: int) -> None:
    assert cache_tokens(metrics) == tokens


def test_tokens_from_the_host_tier_are_cache_hits() -> None:
    metrics = (
        "vllm:prefix_cache_queries_total 1000.0\n"
        "vllm:prefix_cache_hits_total 200.0\n"
        "vllm:external_prefix_cache_queries_total 800.0\n"
        "vllm:external_prefix_cache_hits_total 500.0\n"
    )
    assert load_details(metrics) == {"cache_hits": 0.7}


async def test_load_of_a_vllm_is_read_with_each_check(
    server: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued = iter([2, 5])

    async def text(_: Upstream, path: str, *, timeout_s: float) -> str:
        return f"vllm:num_requests_waiting {next(queued)}"

    monkeypatch.setattr(Upstream, "text", text)
    engine = VllmEngine(server.url)
    for expected in (2, 5):
        await engine.check()
        assert engine.info.details == {"queued": expected}
    await engine.close()


def test_load_in_vllm_metrics_is_that_of_all_ranks_and_lacks_what_is_not_reported() -> None:
    metrics = (
        "# TYPE vllm:num_requests_waiting gauge\n"
        'vllm:num_requests_waiting{engine="0",model_name="m"} 2.0\n'
        'vllm:num_requests_waiting{engine="1",model_name="m"} 1.0\n'
        'vllm:num_requests_waiting_by_reason{engine="1",reason="capacity"} 9.0\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.5\n'
        'vllm:kv_cache_usage_perc{engine="1"} 0.25\n'
        'vllm:prefix_cache_queries_total{engine="0"} 3e+03\n'
        'vllm:prefix_cache_queries_created{engine="0"} 1.7e+09\n'
        'vllm:prefix_cache_hits_total{engine="0"} 1500.0\n'
    )
    assert load_details(metrics) == {"queued": 3, "cache_used": 0.375, "cache_hits": 0.5}
    assert load_details("vllm:prefix_cache_queries_total 0.0\n") == {}
    assert load_details("vllm:kv_cache_usage_perc 1e-02\n") == {"cache_used": 0.01}
