"""Reading what anybody may send: every field typed and bounded, every refusal names it.

Invariant: whatever the JSON holds, a reader here returns a value of the type it says or raises
RequestError with the field's path, its value (shortened) and what was wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import orjson

from proxy.conversation import KnownKeys
from proxy.errors import RequestError
from proxy.recent import MIN_BYTES, Recent

MAX_SHOWN_CHARS = 80
MAX_STOPS = 16
MAX_STOP_CHARS = 1000

_UNHONOURED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "ignore_eos": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "structured_outputs": ({},),
    "suffix": ("",),
    "use_beam_search": (False,),
}
"""What OpenAI's routes and vLLM's take in any dialect, would change what is sampled, and is passed
to no engine; each with what asks for nothing, beside null."""

T = TypeVar("T")


class Fields:
    """An object of a request. Example: Fields(body).integer("max_tokens", 1, 2**31)"""

    def __init__(self, data: Any, path: str = "") -> None:
        if not isinstance(data, dict):
            raise refusal(path or "body", data, "an object")
        self.data: dict[str, Any] = data
        self._path = path

    def path(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def get(self, name: str) -> Any:
        return self.data.get(name)

    def refuse(self, name: str, wanted: str) -> RequestError:
        return refusal(self.path(name), self.data.get(name), wanted)

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
        path = self.path(name)
        return [Fields(item, f"{path}[{i}]") for i, item in enumerate(self.items(name))]

    def each(self, name: str, parse: Callable[[Fields], T]) -> list[T]:
        """What `parse` makes of every object."""
        return [parse(item) for item in self.objects(name)]

    def child(self, name: str) -> Fields:
        """The object at `name`; an empty one where it is absent."""
        value = self.data.get(name)
        return Fields({} if value is None else value, self.path(name))

    def stops(self, name: str) -> tuple[str, ...]:
        value = self.data.get(name)
        strings = [value] if isinstance(value, str) else self.items(name)
        if len(strings) > MAX_STOPS:
            raise self.refuse(name, f"at most {MAX_STOPS} stop strings")
        for string in strings:
            if not isinstance(string, str) or not 0 < len(string) <= MAX_STOP_CHARS:
                raise self.refuse(name, f"strings of 1 to {MAX_STOP_CHARS} characters")
        return tuple(strings)


class Request(Fields):
    """A request's body, which goes on from what its session said before."""

    def __init__(self, data: Any, recent: Recent, session_id: str, body_bytes: int) -> None:
        super().__init__(data)
        self._recent = recent
        self._session_id = session_id
        self._body_bytes = body_bytes
        self.keys: KnownKeys | None = None
        """Of the conversation that this one continues, once its messages were read."""

    def each(self, name: str, parse: Callable[[Fields], T]) -> list[T]:
        """As of `Fields`; objects that came before are not parsed again."""
        if self._body_bytes < MIN_BYTES:
            return super().each(name, parse)
        items, path = self.items(name), self.path(name)
        parsed, self.keys = self._recent.parsed(
            self._session_id,
            items,
            parse,
            lambda index: parse(Fields(items[index], f"{path}[{index}]")),
            self._body_bytes,
        )
        return parsed


def refuse_unhonoured(fields: Fields) -> None:
    """Raises RequestError for what would change the sampling and reaches no engine."""
    for name in sorted(_UNHONOURED.keys() & fields.data.keys()):
        value = fields.get(name)
        if value is not None and value not in _UNHONOURED[name]:
            raise fields.refuse(name, "nothing (this proxy cannot honour it)")


def refusal(path: str, value: Any, wanted: str) -> RequestError:
    try:
        shown = orjson.dumps(value).decode()
    except TypeError:
        shown = repr(value)
    if len(shown) > MAX_SHOWN_CHARS:
        shown = shown[:MAX_SHOWN_CHARS] + "…"
    return RequestError(f"{path}: {wanted} is wanted, not {shown}", param=path)
