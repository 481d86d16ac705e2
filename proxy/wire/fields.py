"""Reads the fields of a request with type and range checks.

Invariant: whatever JSON a client sends, each method returns a value of its declared type or raises
RequestError with the field's path, its value (shortened) and what was expected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from proxy.errors import RequestError

if TYPE_CHECKING:
    from proxy.wire.images import SentImages

MAX_SHOWN_CHARS = 80
MAX_SHOWN_VALUES = 40
"""A list or object with more values is described by their number."""
MAX_STOPS = 16
MAX_STOP_CHARS = 1000


class Note(NamedTuple):
    """A part of a request that is not taken as it is.

    Example: Note("shown_as_text", "image", "messages[4].content[0]", "[image/png, 12 kB]")
    """

    kind: str
    """The kind of the event: `shown_as_text`, `tools_left_out` or `scrubbed`."""
    name: str
    """The type of the item, block or tool; the pattern of the profile that removed text; `template`
    for tools that the model's template does not show."""
    place: str
    text: str = ""
    """What the model sees in its place; what was removed."""


class Fields:
    """One JSON object of a request. Example: Fields(body).integer("max_tokens", 1, 2**31)

    `parent`, `name` and `index` are the object's place in the request, for the message of an error.
    The constructor raises RequestError for data that is not an object.
    """

    __slots__ = ("_index", "_name", "_parent", "backends", "data", "images", "notes")

    def __init__(
        self, data: Any, parent: Fields | None = None, name: str = "", index: int | None = None
    ) -> None:
        self._parent, self._name, self._index = parent, name, index
        self.notes: list[Note] = [] if parent is None else parent.notes
        """Of the whole request."""
        self.backends: frozenset[str] = frozenset() if parent is None else parent.backends
        """The tools of a provider that the proxy runs (`wire.provided`)."""
        self.images: SentImages | None = None if parent is None else parent.images
        """Takes the request's images; None: the model reads only text."""
        if not isinstance(data, dict):
            raise refusal(self._own_path() or "body", data, "an object")
        self.data: dict[str, Any] = data

    def path(self, name: str) -> str:
        """Example: `messages[3].content`"""
        own = self._own_path()
        return f"{own}.{name}" if own else name

    def _own_path(self) -> str:
        if self._parent is None:
            return ""
        path = self._parent.path(self._name)
        return path if self._index is None else f"{path}[{self._index}]"

    def note(self, kind: str, name: str, text: str = "") -> None:
        """Notes that this object is not taken as it is."""
        self.notes.append(Note(kind, name, self._own_path(), text))

    def get(self, name: str) -> Any:
        return self.data.get(name)

    def refuse(self, name: str, expected: str) -> RequestError:
        return refusal(self.path(name), self.data.get(name), expected)

    def text(self, name: str, default: str | None = None) -> str:
        value = self.data.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.refuse(name, "a string")
        return value

    def optional_text(self, name: str) -> str | None:
        value = self.data.get(name)
        if value is not None and not isinstance(value, str):
            raise self.refuse(name, "a string")
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self.data.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.refuse(name, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        value = self.data.get(name)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.refuse(name, f"a number from {low} to {high}")
        if not low <= value <= high:
            raise self.refuse(name, f"a number from {low} to {high}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.data.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(name, "true or false")
        return value

    def items(self, name: str) -> list[Any]:
        value = self.data.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.refuse(name, "a list")
        return value

    def objects(self, name: str) -> list[Fields]:
        return [Fields(item, self, name, i) for i, item in enumerate(self.items(name))]

    def child(self, name: str) -> Fields:
        """The object at `name`, or an empty one if it is absent."""
        value = self.data.get(name)
        return Fields({} if value is None else value, self, name)

    def quoted(self, name: str) -> str:
        """The string at `name`, in what an agent only quotes from its history; empty if there is
        none, which is no reason to refuse a request."""
        value = self.data.get(name)
        return value if isinstance(value, str) else ""

    def quoted_objects(self, name: str) -> list[Fields]:
        """The objects at `name`, one or a list of them; see `quoted`."""
        value = self.data.get(name)
        found = value if isinstance(value, list) else [value]
        return [Fields(each, self, name, i) for i, each in enumerate(found) if type(each) is dict]

    def stops(self, name: str) -> tuple[str, ...]:
        value = self.data.get(name)
        strings = [value] if isinstance(value, str) else self.items(name)
        if len(strings) > MAX_STOPS:
            raise self.refuse(name, f"at most {MAX_STOPS} stop strings")
        for string in strings:
            if not isinstance(string, str) or not 0 < len(string) <= MAX_STOP_CHARS:
                raise self.refuse(name, f"strings of 1 to {MAX_STOP_CHARS} characters")
        return tuple(strings)


def only_provider_tools(fields: Fields) -> RequestError:
    """The error for a request all of whose tools are run by a provider, such as a web search."""
    given = [tool for tool in fields.items("tools") if isinstance(tool, dict)]
    kinds = [tool.get("type") or next(iter(tool), None) for tool in given]  # Google's have no type
    named = ", ".join(str(kind)[:MAX_SHOWN_CHARS] for kind in kinds[:5])
    return RequestError(
        f"tools: {named} would be run by the model's provider, which this proxy has none of; offer "
        "the model a tool that the agent runs",
        param="tools",
    )


def refusal(path: str, value: Any, expected: str) -> RequestError:
    return RequestError(f"{path}: expected {expected}, got {_shown(value)}", param=path)


def _shown(value: Any) -> str:
    """The value as JSON, shortened. A long list or object is not serialised as a whole."""
    if isinstance(value, dict | list) and len(value) > MAX_SHOWN_VALUES:
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)} values"
    shown = orjson.dumps(value[:MAX_SHOWN_CHARS] if isinstance(value, str) else value).decode()
    return shown if len(shown) <= MAX_SHOWN_CHARS else shown[:MAX_SHOWN_CHARS] + "…"
