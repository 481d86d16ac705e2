"""An engine on a Ray cluster: an actor on each of its nodes, which start and end together.

Invariant: after `wait` has returned, or `start` has failed, no part of the engine's server runs. No
part would otherwise end when another one has: the rest would wait for its workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NoReturn

import ray

from proxy.engines.vllm_nodes import ServerPart
from trainer.errors import TrainerError
from trainer.extras.ray.actors import ActorGoneError, awaited, end, until_end
from trainer.run.control import first_to_end


class PartActor:
    """The actor of one node of an engine, which is replaced by another one after it has ended."""

    def __init__(self, name: str, place: Callable[[str], Awaitable[Any]]) -> None:
        """`place` makes an actor and returns it once it runs on a node. It takes a name for
        messages."""
        self._whose = f"the actor of {name}"
        self._place = place
        self._actor: Any = None

    async def be_placed(self) -> bool:
        """Returns when an actor runs; whether it is a new one.

        Raises:
            TrainerError, ActorGoneError: no other node has room, or the actor does not start.
        """
        if self._actor is not None:
            try:
                await self.ask("__ray_ready__")
                return False
            except ActorGoneError:
                pass
        self._actor = await self._place(self._whose)
        return True

    async def ask(self, method: str, *arguments: Any) -> Any:
        """What a method of the actor returns.

        Raises:
            ActorGoneError: the actor has ended.
        """
        try:
            return await awaited(getattr(self._actor, method).remote(*arguments), self._whose)
        except ActorGoneError:
            ray.kill(self._actor)  # it may still run, out of reach; this frees its name
            self._actor = None
            raise

    async def wait(self) -> str:
        """Returns when its part of the server has ended; the result says how."""
        how, self._actor = await until_end(self._actor, self._whose)
        return how

    async def stop_server(self) -> None:
        """Ends its part of the server. The actor stays."""
        if self._actor is not None:
            try:
                await self.ask("stop")
            except ActorGoneError:
                return  # its processes have ended with it

    async def stop(self) -> None:
        await end(self._actor, self._whose)


class RayReplica:
    """Example: RayReplica([PartActor("engine-0", place), PartActor("engine-0-node-1", place)])"""

    def __init__(self, parts: Sequence[PartActor]) -> None:
        """`parts`: of the engine's nodes; the first one answers calls."""
        self._parts = parts
        self.url = ""

    async def start(self) -> None:
        """Starts all parts. An actor that ends meanwhile is replaced once, if it is not a new one:
        the server of a node that is lost can end before the actor does."""
        try:
            news = [await part.be_placed() for part in self._parts]
            try:
                self.url = await self._started()
            except ActorGoneError:
                if all(news):
                    raise
                await self._stop_servers()
                for part in self._parts:
                    await part.be_placed()
                self.url = await self._started()
        except BaseException:
            await self._stop_servers()
            raise

    async def _started(self) -> str:
        first, *others = self._parts
        if not others:
            url: str = await first.ask("start")
            return url
        meeting = await first.ask("meeting")
        for node, part in enumerate(others, start=1):
            await part.ask("start", ServerPart(node, len(self._parts), meeting))
        answering = first.ask("start", ServerPart(0, len(self._parts), meeting))
        return await first_to_end([answering, *(_until_lost(part) for part in others)])

    async def wait(self) -> str:
        """Returns when one of the parts has ended, and the others have been ended."""
        how = await first_to_end(part.wait() for part in self._parts)
        if len(self._parts) > 1:
            await self._stop_servers()
        return how

    async def stop(self) -> None:
        await asyncio.gather(*(part.stop() for part in self._parts))

    async def _stop_servers(self) -> None:
        await asyncio.gather(*(part.stop_server() for part in self._parts))


async def _until_lost(part: PartActor) -> NoReturn:
    how = await part.wait()
    raise TrainerError(f"the engine did not start, because its workers on a node ended: {how}")
