"""The images of requests: prepared by an engine, once for each content, and recorded before a turn
names them.

Invariant: what stands in a prompt for an image, and the pixels that an engine gets for it, are what
an engine has made of exactly the bytes that the agent sent. An engine that makes something else of
the same bytes is refused.
"""

from __future__ import annotations

import asyncio
import binascii
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from importlib import import_module
from weakref import WeakValueDictionary

import aiohttp
from msgspec import structs

from proxy.conversation.images import named
from proxy.conversation.messages import Conversation
from proxy.engines.protocol import PreparedImage, PromptImages
from proxy.errors import ConfigurationError, EngineError, EngineRefusal, ImageError
from proxy.extra_registry import PDF_PAGES
from proxy.machine.direct_hosts import proxy_for
from proxy.records import ImageSpan, RecordedImage
from proxy.rendering.rendering import Rendering
from proxy.routing.router import Router
from proxy.serving.sessions import LiveSession
from proxy.store.protocol import Store
from proxy.wire.fields import Note
from proxy.wire.images import (
    MAX_BYTES,
    Made,
    SentImage,
    SentImages,
    SentLink,
    fetched_image,
)

_log = logging.getLogger(__name__)

RenderPages = Callable[[bytes], Awaitable[tuple[list[bytes], int] | None]]
"""Gets a PDF; returns the first pages as PNG, and the number of all, or None."""
KNOWN_IMAGES = 100_000
"""Images whose number of tokens is remembered."""
ITEMS_BYTES = 256 * 2**20
"""Limit of the preparations that are kept, which every engine gets once. A screenshot has 6 MB."""
AT_ONCE = 4
"""Images of one request that are prepared at the same time."""
DOCUMENTS_AT_ONCE = 2
"""Documents of all requests that are rendered at the same time, each in a process."""
LOOK_AGAIN_S = 0.5
FETCH_S = 20.0
"""Seconds after which an image that is fetched from an URL is shown as text."""


class Images:
    """What this process knows of images."""

    def __init__(
        self, store: Store, router: Router, rendering: Rendering, urls: Sequence[str] = ()
    ) -> None:
        """`urls`: beginnings of those from which images are fetched."""
        self._urls = urls
        self._pages = _page_renderer()
        self._store = store
        self._router = router
        self._rendering = rendering
        self._known: OrderedDict[str, ImageSpan | None] = OrderedDict()
        """By sha256; None: no engine can read it."""
        self._items: OrderedDict[str, str] = OrderedDict()
        """By digest."""
        self._items_bytes = 0
        self._learning: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By sha256: held by the request that prepares the image, for which others wait."""
        self._documents = asyncio.Semaphore(DOCUMENTS_AT_ONCE)

    def new(self, live: LiveSession) -> SentImages | None:
        """Takes the images of a request; None: no engine reads them, and they are shown as
        texts."""
        if self._rendering.image_token is None:
            return None
        if not (self._router.may_read_images or live.tree.has_images):
            return None
        return SentImages(self._urls, documents=self._pages is not None)

    async def learn(
        self, conversation: Conversation, sent: SentImages, live: LiveSession
    ) -> list[Note]:
        """Fills `Conversation.images`. An image that no engine can read, or that cannot be fetched,
        is shown as a text, which the notes name. Raises EngineError."""
        linked = [name for name in named(conversation.messages) if name in sent.linked]
        if linked:
            await self._make(linked, sent, live)
            sent.fetched(conversation.messages, live.made_images)
        names = list(dict.fromkeys(named(conversation.messages)))
        nodes = live.tree.nodes if names else []
        recorded = {image.sha256: image for node in nodes for image in node.images}
        room, unread = asyncio.Semaphore(AT_ONCE), set[str]()

        async def learn_one(sha256: str) -> None:
            image = recorded.get(sha256)
            if image is None:
                async with room, self._lock(sha256):
                    image = await self._learn(sent.found[sha256])
            if image is None:
                unread.add(sha256)
            else:
                conversation.images[sha256] = image

        await asyncio.gather(*map(learn_one, names))
        if unread:
            sent.shown_in(conversation.messages, unread)
        shown = [sent.found[sha256].shown for sha256 in sorted(unread)]
        made = live.made_images
        shown += [sent.linked[name].shown for name in linked if made[name] is None]
        return [Note("shown_as_text", "image", "messages", text) for text in shown]

    async def _make(self, linked: Sequence[str], sent: SentImages, live: LiveSession) -> None:
        """Each URL and each document once for a session, whose history then stays what it is."""
        room, made = asyncio.Semaphore(AT_ONCE), live.made_images

        async def make(name: str, link: SentLink) -> None:
            async with room:
                if link.url is not None:
                    made[name] = await _fetched(link.url, link.shown)
                else:
                    made[name] = await self._rendered(link.document or "", link.shown)

        new = [name for name in dict.fromkeys(linked) if name not in made]
        await asyncio.gather(*(make(name, sent.linked[name]) for name in new))

    async def _rendered(self, document: str, shown: str) -> Made | None:
        assert self._pages is not None  # otherwise there are no documents
        try:
            data = binascii.a2b_base64(document)
        except (binascii.Error, ValueError):
            return None
        async with self._documents:
            found = await self._pages(data)
        if found is None:
            return None
        pages, count = found
        images = [fetched_image(page, shown) for page in pages]
        rest = f"\n[the first {len(pages)} of {count} pages]" if count > len(pages) else ""
        whole = [image for image in images if image is not None]
        return (whole, rest) if whole and len(whole) == len(pages) else None

    async def record(self, live: LiveSession, names: Sequence[str], sent: SentImages) -> None:
        """Stores images that a turn of the session is going to name. Raises StoreError and
        SessionError."""
        images = [sent.found[name] for name in names]
        stored = [RecordedImage(each.sha256, each.media_type, each.data) for each in images]
        await self._store.add_images(live.session.session_id, stored)
        _forget_bytes(live, set(names))

    def of_prompt(self, spans: tuple[ImageSpan, ...]) -> PromptImages | None:
        """The images of a prompt, for an engine."""
        return PromptImages(spans, self._item) if spans else None

    def _lock(self, sha256: str) -> asyncio.Lock:
        return self._learning.setdefault(sha256, asyncio.Lock())

    async def _learn(self, image: SentImage) -> ImageSpan | None:
        """None: no engine can read it. Raises EngineError."""
        if image.sha256 in self._known:
            return self._known[image.sha256]
        try:
            made = await self._prepared(image.data, image.media_type)
        except EngineRefusal:
            if self._router.may_read_images:
                self._remember(image.sha256, None)
            return None
        span = ImageSpan(0, made.tokens, made.token, made.digest, image.sha256, made.grid)
        self._keep(made)
        self._remember(image.sha256, span)
        return span

    async def _item(self, span: ImageSpan) -> str:
        async with self._lock(span.sha256):
            return await self._item_alone(span)

    async def _item_alone(self, span: ImageSpan) -> str:
        item = self._items.get(span.digest)
        if item is not None:
            self._items.move_to_end(span.digest)
            return item
        image = await self._store.get_image(span.sha256)
        if image is None:
            raise ImageError(f"image {span.sha256} is not in the store; was its session deleted?")
        try:
            made = await self._prepared(image.data, image.media_type)
        except EngineRefusal as error:
            _log.warning("image %s: %s", span.sha256, error.message)
            raise ImageError(
                f"image {span.sha256} was recorded, but the engine refuses it now; the proxy's log "
                "has its message"
            ) from error
        if (made.digest, made.tokens) != (span.digest, span.tokens):
            raise ImageError(
                f"image {span.sha256} was recorded as {span.tokens} tokens of {span.digest}, but "
                f"the engine makes {made.tokens} tokens of {made.digest} of it: it has another "
                "processor than the one that recorded it"
            )
        self._keep(made)
        return made.item

    async def _prepared(self, data: bytes, media_type: str) -> PreparedImage:
        """What the first engine that can makes of it. Raises EngineError, and EngineRefusal: it
        cannot be read, or no engine reads images."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._router.patience_s
        while True:
            failure = EngineError("no engine that reads images is there; try again")
            for engine in self._router.image_readers():
                try:
                    return await engine.prepare(data, media_type)
                except EngineError as error:
                    failure = error
            if not self._router.may_read_images:
                raise EngineRefusal("no engine reads images")
            left_s = deadline - loop.time()
            if left_s <= 0:
                _log.warning("no engine prepared an image: %s", failure.message)
                raise EngineError(
                    "no engine prepared an image of the request within "
                    f"{self._router.patience_s:g} s; try again"
                ) from failure
            await self._router.until_joined(min(left_s, LOOK_AGAIN_S))

    def _remember(self, sha256: str, span: ImageSpan | None) -> None:
        self._known[sha256] = span
        while len(self._known) > KNOWN_IMAGES:
            self._known.popitem(last=False)

    def _keep(self, made: PreparedImage) -> None:
        if made.digest not in self._items:
            self._items[made.digest] = made.item
            self._items_bytes += len(made.item)
        while self._items_bytes > ITEMS_BYTES and len(self._items) > 1:
            self._items_bytes -= len(self._items.popitem(last=False)[1])


def _forget_bytes(live: LiveSession, stored: set[str]) -> None:
    """Leaves the bytes of fetched and rendered images to the store, which has them now."""
    for name, made in live.made_images.items():
        if made is not None and any(image.text and image.sha256 in stored for image in made[0]):
            images = [
                structs.replace(image, text="") if image.sha256 in stored else image
                for image in made[0]
            ]
            live.made_images[name] = images, made[1]


async def _fetched(url: str, shown: str) -> Made | None:
    """The image of an URL, which may not lead to another one; None: there is none."""
    timeout, data = aiohttp.ClientTimeout(total=FETCH_S), bytearray()
    try:
        async with (
            aiohttp.ClientSession(proxy=proxy_for(url)) as http,
            http.get(url, timeout=timeout, allow_redirects=False) as response,
        ):
            if response.status != 200:
                return None
            async for part in response.content.iter_any():
                data += part
                if len(data) > MAX_BYTES:
                    return None
    except (aiohttp.ClientError, ConfigurationError, TimeoutError, ValueError):
        return None
    image = fetched_image(bytes(data), shown)
    return None if image is None else ([image], "")


def _page_renderer() -> RenderPages | None:
    """None where the extra or its library is not there."""
    if PDF_PAGES is None:
        return None
    module = import_module(PDF_PAGES)
    return module.pages if module.is_installed() else None
