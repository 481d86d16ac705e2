"""The control plane of policies: which version of each is sampled from, and which run publishes it.

Invariant: a policy that a run has published gets no version of another run until that run has
released it, at whichever of the proxies on one store. A new version is sampled from at once at the
proxy at which it is published, and at the others as soon as the store notifies them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, Protocol
from urllib.parse import quote

from aiohttp import web

from proxy.control.schema import PolicyVersion, check_policy, parsed
from proxy.control.siblings import is_from_sibling
from proxy.errors import RequestError, SessionError, StoreError
from proxy.http.server import read_body
from proxy.records import ServedPolicy
from proxy.routing.policies import BASE
from proxy.routing.router import Router
from proxy.store.protocol import Store

RECONNECT_S = 1.0
"""Seconds until the store is asked again for notifications after it failed."""

_log = logging.getLogger(__name__)


class BaseWeights(Protocol):
    """What makes engines serve the policy without a name: the weights themselves."""

    @property
    def wanted(self) -> object:
        """What the engines are to serve."""
        ...

    def restore(self, served: ServedPolicy, before: Any) -> None:
        """Makes the engines serve what was recorded, if `before` is still what is wanted."""
        ...


class PublishedPolicies:
    """Example:
    async with PublishedPolicies(store, router).followed():
        ...  # a version that another proxy publishes is sampled from here, too
    """

    def __init__(self, store: Store, router: Router) -> None:
        self._store = store
        self._router = router
        self._base: BaseWeights | None = None

    def follow_base(self, weights: BaseWeights) -> None:
        """From now on, `weights` gets the recorded version of the policy without a name."""
        self._base = weights

    async def restore(self) -> None:
        """Publishes the recorded version of each policy, except of those that are published while
        they are read."""
        before = self._router.policies.published
        wanted = None if self._base is None else self._base.wanted
        for served in await self._store.get_policies():
            if served.name == BASE.name:
                if self._base is not None:
                    self._base.restore(served, wanted)
                continue
            current = self._router.policies.current(served.name)
            if current is None or current in before:
                await self._router.publish(served)

    @asynccontextmanager
    async def followed(self) -> AsyncIterator[None]:
        """A context in which the recorded versions are published, and those of other proxies on
        the store as soon as they are."""
        await self.restore()
        following = asyncio.create_task(self._follow())
        try:
            yield
        finally:
            following.cancel()
            await asyncio.wait([following])

    async def _follow(self) -> None:
        """Returns at once if no others can use the store."""
        while True:
            try:
                async with aclosing(self._store.policy_changes()) as changes:
                    async for _ in changes:
                        await self.restore()
                return
            except StoreError as error:
                _log.warning("new versions of policies are not seen: %s", error)
            except Exception:  # noqa: BLE001 (else old versions would be sampled from for good)
                _log.exception("new versions of policies are not seen; trying again")
            await asyncio.sleep(RECONNECT_S)

    async def publish(self, request: web.Request) -> ServedPolicy:
        """Makes an adapter the current version of a policy.

        Raises:
            SessionError: 409, the policy belongs to another run.
        """
        new = parsed(PolicyVersion, await read_body(request))
        served = ServedPolicy(_name(request), new.version, new.adapter, new.run)
        if not is_from_sibling(request) and not await self._store.publish_policy(served):
            owner = await self._owner(served.name)
            raise SessionError(
                f"the policy {served.name!r} belongs to the run {owner!r}; set model.lora.policy "
                "(or the name in trainer.policies) to another name, or end or continue that run. "
                "If it was killed and will not be continued: DELETE "
                f"/policies/{served.name}/runs/{quote(owner, safe='')}",
                status=409,
            )
        await self._router.publish(served)
        return served

    async def release(self, request: web.Request) -> None:
        """Lets other runs publish the policy, if it belongs to this run."""
        run = request.match_info["run"]
        await self._store.release_policy(_name(request), run)

    async def _owner(self, name: str) -> str:
        found = await self._store.get_policies()
        return next((served.run for served in found if served.name == name), "")


def _name(request: web.Request) -> str:
    try:
        return check_policy(request.match_info["name"])
    except ValueError as error:
        raise RequestError(f"name: {error}", param="name") from error
