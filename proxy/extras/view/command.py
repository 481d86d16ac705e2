"""`agentic-proxy view` shows a run or a store in the browser; `view-key` says who else may look.

Invariant: the page of `view` listens on loopback unless told otherwise, and opens with the link
that is printed.
"""

from __future__ import annotations

import asyncio
import signal
from argparse import Namespace
from collections.abc import Awaitable, Callable
from datetime import datetime
from functools import partial
from pathlib import Path

from aiohttp import web
from rich.console import Console
from rich.table import Table

from proxy.admin_key import AdminKeys, key_file
from proxy.commands.removal import remove
from proxy.commands.sessions import named_store
from proxy.config import ListenConfig
from proxy.errors import ConfigurationError
from proxy.extras.view.access import LINK_SUFFIX, Access, new_key, new_link, said_link
from proxy.extras.view.answers import RecordState
from proxy.extras.view.api import PAGE, ViewApi, add_page
from proxy.extras.view.curation_requests import CurationRequests
from proxy.extras.view.masking import Masking
from proxy.extras.view.runs import RecordedRuns
from proxy.http.server import app_runner
from proxy.http.web_guard import Hosts, web_guard
from proxy.machine.port import http_url, unusable_port
from proxy.rendering.tokenizer import Tokenizer, load_tokenizer
from proxy.store.browser import GrantKind
from proxy.store.protocol import Store


async def view(arguments: Namespace) -> int:
    """Serves the page for runs or a store until SIGINT or SIGTERM."""
    runs = _runs(arguments)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with named_store(arguments) as (store, config):
        model: Path | None = arguments.model or config.model
        if model is None and runs:
            model = next(iter(runs.values())).model
        tokenizer = None if model is None else load_tokenizer(model)
        listen = ListenConfig(host=arguments.host, port=arguments.port, admin_key=config.admin_key)
        delete = partial(remove, store, config)
        hides = not arguments.with_secrets
        app = build_view(listen, store, tokenizer, runs, delete=delete, hides=hides)
        runner = app_runner(app, handler_cancellation=True)
        await runner.setup()
        try:
            await web.TCPSite(runner, listen.host, listen.port).start()
        except OSError as error:
            raise unusable_port("--port", listen.host, listen.port, error) from error
        host, port = runner.addresses[0][:2]
        key = key_file(config)
        file = key.with_name(key.name + LINK_SUFFIX)
        secret = await new_link(store.browser, edits=arguments.edit)
        link = said_link(http_url(host, port), secret, file)
        print(link, flush=True)
        if tokenizer is None:
            print("add --model FOLDER to see the text of tokens", flush=True)
        await stop.wait()
        await runner.cleanup()
    return 0


def _runs(arguments: Namespace) -> RecordedRuns:
    """The runs to show. Sets the store: that of the first run, or the one that is named.

    Raises:
        ConfigurationError: a folder without a run, a run without sessions, or several stores.
    """
    folders = [Path(each) for each in arguments.shown if Path(each).is_dir()]
    stores = [each for each in arguments.shown if not Path(each).is_dir()]
    if len(stores) > 1 or (stores and arguments.store is not None):
        raise ConfigurationError(
            f"the page shows one store, but {', '.join(filter(None, [*stores, arguments.store]))}"
            " were given; start one `agentic-proxy view` for each"
        )
    for folder in folders:
        if not (folder / "config.yaml").is_file():
            raise ConfigurationError(f"{folder}: is not a run's folder: it has no config.yaml")
    runs = RecordedRuns(folders)
    if stores:
        arguments.store = stores[0]
    elif runs and arguments.store is None:
        sessions = next(iter(runs.values())).sessions
        if not sessions.is_file():
            raise ConfigurationError(
                f"{sessions}: the run has no sessions of its own; name the store that has them:"
                " agentic-proxy view RUN --store URL"
            )
        arguments.store = f"sqlite:///{sessions.absolute()}"
    return runs


def build_view(
    config: ListenConfig,
    store: Store,
    tokenizer: Tokenizer | None,
    runs: RecordedRuns | None = None,
    *,
    delete: Callable[[str], Awaitable[object]] | None = None,
    hides: bool = True,
) -> web.Application:
    """The page as an application of its own. `delete` removes a session, by default from the store.
    `hides`: secrets are masked."""
    guard = web_guard(Hosts(config.host, config.allowed_hosts), pages=(PAGE,))
    app = web.Application(middlewares=[guard])
    access = Access(lambda: store.browser, AdminKeys(config), secure=False)
    api = ViewApi(
        lambda: store.browser,
        access,
        _nothing_recorded,
        lambda: tokenizer,
        runs,
        curation=CurationRequests(
            lambda: store, delete or store.delete_session, lambda: tokenizer, hides=hides
        ),
        masking=Masking(hides=hides),
    )
    add_page(app, lambda: api)

    async def end(_: web.Application) -> None:
        api.close()

    app.on_shutdown.append(end)
    return app


def _nothing_recorded() -> RecordState:
    """What a page knows that is not the proxy's own."""
    return {
        "engines": [],
        "policies": [],
        "paused": False,
        "waiting": 0,
        "rule_faults": [],
        "learners": [],
    }


async def create_key(arguments: Namespace) -> int:
    """Prints a new key, which is shown only here."""
    async with named_store(arguments) as (store, _):
        key = await new_key(store.browser, arguments.name)
    print(key)
    print(f"the page's address with #key={key} at its end opens it until the key is revoked")
    return 0


async def revoke_key(arguments: Namespace) -> int:
    """Ends a key, and the cookies of all browsers that it opened the page in."""
    async with named_store(arguments) as (store, _):
        if not await store.browser.revoke_grants(arguments.name):
            raise ConfigurationError(
                f"there is no key {arguments.name!r}; `agentic-proxy view-key list` prints all"
            )
    return 0


async def list_keys(arguments: Namespace) -> int:
    """Prints the names of all keys."""
    table = Table("name", "created", box=None, pad_edge=False)
    async with named_store(arguments) as (store, _):
        for key in await store.browser.grants(GrantKind.KEY):
            created = datetime.fromtimestamp(key.created_at).astimezone()
            table.add_row(key.name, created.isoformat(sep=" ", timespec="seconds"))
    Console(soft_wrap=True).print(table)
    return 0
