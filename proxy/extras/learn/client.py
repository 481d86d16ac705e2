"""A client of the requests of learners; with a learner's key, or the admin key for orders."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from proxy.client import ProxyClient
from proxy.records import Session, Turn
from proxy.records.binary import CONTENT_TYPE, decode_record


class LearnClient(ProxyClient):
    """Example:
    async with LearnClient("http://127.0.0.1:8000", key) as recorder:
        sessions = await recorder.readable("work")
    """

    async def readable(self, policy: str) -> list[dict[str, Any]]:
        """The ended sessions that have opted in, as `GET /sessions` shows them."""
        found: list[dict[str, Any]] = (await self._json("GET", f"/learn/{policy}/sessions"))[
            "sessions"
        ]
        return found

    async def record(self, policy: str, session_id: str) -> tuple[Session, list[Turn]]:
        """Raises ProxyClientError (404): the session has not opted in, or is not there."""
        path = f"/learn/{policy}/record?session={quote(session_id, safe='')}"
        return decode_record(await self._bytes("GET", path, headers={"Accept": CONTENT_TYPE}))

    async def image_of(self, policy: str, session_id: str, sha256: str) -> bytes:
        """An image that a turn of the session names, as its agent sent it.

        Raises ProxyClientError: 404, as `record`, or no turn names it."""
        path = f"/learn/{policy}/images/{sha256}?session={quote(session_id, safe='')}"
        return await self._bytes("GET", path)

    async def say(self, policy: str, session_id: str, text: str) -> None:
        """Shows on the page what was decided about a session."""
        path = f"/learn/{policy}/decision?session={quote(session_id, safe='')}"
        await self._json("PUT", path, {"text": text})

    async def publish_adapter(self, policy: str, number: int, adapter: str) -> None:
        """Makes the engines' adapter the policy `POLICY-NUMBER`."""
        await self._json("PUT", f"/learn/{policy}/adapters/{number}", {"adapter": adapter})

    async def assignment(self, policy: str) -> dict[str, Any]:
        """The fields of `Assignment`, and `open`: policy → number of open sessions that have it."""
        return await self._json("GET", f"/learn/{policy}/assignment")

    async def assign(
        self,
        policy: str,
        *,
        stable: int,
        canary: int | None = None,
        share: float = 0.0,
        done: str = "",
        told: str = "",
    ) -> None:
        """From now on, new sessions get these adapters. `done`: the order that this carries out.
        `told`: the name of the last switch that the journal has."""
        body = {"stable": stable, "canary": canary, "share": share, "done": done, "told": told}
        await self._json("PUT", f"/learn/{policy}/assignment", body)

    async def order(self, policy: str, order: str) -> dict[str, Any]:
        """`promote`, `rollback`, `freeze` or `thaw`; needs the admin key."""
        return await self._json("PUT", f"/learn/{policy}/order", {"order": order})

    async def state(self, policy: str) -> dict[str, Any]:
        """As `assignment`; needs the admin key."""
        return await self._json("GET", f"/learn/{policy}/state")
