"""Reads calls that are written with one tag per argument, finished or not.

    <tool_call>                                 →   write {"path":"a.py","text":"  x = 1\\n"}
    <function=write>
    <parameter=path>
    a.py
    </parameter>
    …

Invariants: what the family's template writes for a call is read as that call. While the text grows,
the calls and their arguments only grow. A value is never cut at a tag that is part of it.

A value is written as it is, so it may contain the family's own tags. A tag ends the value if the
template could have written it: on a line of its own where the template does that, followed by the
next argument or by the end of the call, after which the answer ends or goes on with another call.
Tags that open and close inside the value belong together. If no tag is such an end, a tag with
other white space is. Where two readings remain (`x</arg_value><arg_key>b</arg_key>…` in a string is
what the template writes for two arguments), the text is two arguments. Where a value may as well
have been cut (an argument is given twice, or follows after other white space than the template's in
a call that is otherwise the template's), the arguments are not JSON: the rest is passed on as
written.

The same holds for calls. After a call whose opening is the template's, a further call begins if it
follows as the template writes it: after the same white space, with the same opening. Anything else
may be part of a value (an example of two calls in a file). It is, if the answer closes more calls
than it opens from there on, which is known only at the end of the answer. If it does not, text
between two calls is what the model says there; if only white space is between them, the arguments
are not JSON: the rest of the answer is passed on as written.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from itertools import accumulate, chain
from typing import Any

import orjson

from proxy.conversation import ToolCall
from proxy.rendering.argument_types import (
    ArgumentType,
    argument_type,
    declared_keys,
    tool_parameters,
)

MAX_KEY_CHARS = 512
"""Longer names are not names, so that a search for the end of one is short."""
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class CallTags:
    """The tags of a format of calls, in the order in which they are written."""

    call: str
    """Opens a call."""
    name: re.Pattern[str]
    """The tool's name, after `call`, as the group `name`."""
    opening: str
    """What the template writes after `call`, with `{}` for the tool's name."""
    key: tuple[str, str]
    """Around the name of an argument."""
    value: tuple[str, ...]
    """Between the name of an argument and its value. If there are two, the first says that the
    value is a string, and the second that it is JSON."""
    closes: str
    """Closes a value."""
    ends: tuple[str, ...]
    """Ends a call."""
    nests: str
    """What an opening of a value has, and `closes` closes."""
    around: tuple[str, ...] = ()
    """Around all calls of an answer."""
    between: str = "\n"
    """Between two tags."""
    between_calls: str | None = None
    """Between two calls. None: as between two tags."""
    between_calls_after_text: str | None = None
    """Also between two calls, if the answer begins with text."""
    no_arguments: str = ""
    """In a call without arguments, after `between`."""
    on_lines: bool = False
    """A line break precedes and follows each value."""
    python_words: bool = False
    """`True`, `False` and `None` are written for booleans and null."""
    text_goes_on: bool = False
    """The package's parser also returns text after a call."""
    in_each_call: str = ""
    """A token in the opening of each call, after which the package's parser need not read. For a
    parser that goes through an answer once, but in a time that grows with its square."""


@dataclass(frozen=True, slots=True)
class _Argument:
    """An opening of an argument."""

    at: int
    key: str
    value_at: int
    is_text: bool | None
    """None: the format does not say."""
    on_lines: bool
    is_exact: bool
    """Whether the white space between its tags, and before them, is the template's."""


@dataclass(frozen=True, slots=True)
class _Close:
    """A tag that may close a value."""

    at: int
    then: _Argument | int | None
    """The next argument; the position after the call's end; None: the text ends before it is
    known."""


class _Cut(Enum):
    CUT = auto()
    """The text ends before it is known what stands there."""


class _Next(Enum):
    """What follows the end of a call."""

    CALL = auto()
    """A call, as the template writes one after another."""
    OTHER_CALL = auto()
    """A call, without text before it."""
    TEXT = auto()
    """Text, also if it is the beginning of a malformed call; or nothing."""
    UNKNOWN = auto()


_CUT = _Cut.CUT
_JSON = ArgumentType({"type": ["integer", "number", "boolean", "null", "object", "array"]}, None)


def tagged_calls(
    tags: CallTags,
    text: str,
    tools: list[dict[str, Any]],
    *,
    unfinished: bool,
    after_text: bool = False,
) -> list[ToolCall | str]:
    """The calls in the text from the first call of an answer on, and other text that is there:
    malformed calls, and what the model says after a call. `unfinished`: more text may follow; what
    it could change is left out. `after_text`: the answer has text before its first call."""
    if unfinished:
        text = text.rstrip("\N{REPLACEMENT CHARACTER}")
    return list(_Reader(tags, text, tools, unfinished, after_text).items())


class _Reader:
    def __init__(
        self,
        tags: CallTags,
        text: str,
        tools: list[dict[str, Any]],
        unfinished: bool,
        after_text: bool,
    ) -> None:
        self._tags = tags
        self._text = text
        self._tools = tools
        self._unfinished = unfinished
        usual, other = tags.between_calls, tags.between_calls_after_text
        self._joins = {tags.between if usual is None else usual}
        if after_text and other is not None:
            self._joins.add(other)
        empty = tags.between + tags.no_arguments
        self._empty = empty + tags.between.join(tags.ends)
        self._marks = re.compile(f"{re.escape(tags.nests)}|{re.escape(tags.closes)}")
        self._nested = self._strict = True
        """Once a value has no end for a rule, the rule is given up, so that values are not searched
        to the end of the text again and again."""
        self._parameters: Any = None
        """The schema of the tool that is called."""
        self._keys: list[str] = []
        """Its arguments that cannot be read without knowing them."""
        self._is_templates = False
        """Whether the opening of the call that is read is the template's."""

    def items(self) -> Iterator[ToolCall | str]:
        at = 0
        while (begins := self._text.find(self._tags.call, at)) >= 0:
            if at:
                yield from self._said(at, begins)
            item, at = self._call(begins)
            if item is not None:
                yield item
            if at < 0:
                return
        if not self._unfinished:
            yield from self._said(at, len(self._text))

    def _said(self, start: int, end: int) -> Iterator[str]:
        said, before = self._text[start:end].strip(), ""
        while start and said != before:
            before = said
            for tag in self._tags.around:
                said = said.removeprefix(tag).removesuffix(tag).strip()
        if said:
            yield said

    def _call(self, begins: int) -> tuple[ToolCall | str | None, int]:
        """The call and the position after it, which is -1 if the text ends within it."""
        named = self._tags.name.match(self._text, begins + len(self._tags.call))
        if named is None:
            return self._malformed(begins)
        self._parameters = tool_parameters(self._tools, named["name"])
        self._keys = [
            key
            for key in sorted(declared_keys(self._parameters), key=len, reverse=True)
            if self._tags.key[1] in key or "\n" in key or len(key) > MAX_KEY_CHARS
        ]
        argument = self._argument(named.end())
        if isinstance(argument, _Argument):
            self._is_templates = self._is_opening(named) and self._is_exact_argument(argument)
            arguments, end = self._arguments(argument)
            return ToolCall("", named["name"], arguments), end
        after = self._ended(named.end())
        if argument is None and isinstance(after, int):
            return ToolCall("", named["name"], "{}"), after
        return self._malformed(begins)

    def _malformed(self, begins: int) -> tuple[str | None, int]:
        if self._unfinished:
            return None, -1
        last = self._tags.ends[-1]
        end = self._text.find(last, begins)
        end = len(self._text) if end < 0 else end + len(last)
        next_call = self._text.find(self._tags.call, begins + 1)
        if 0 <= next_call < end:
            end = next_call
        return self._text[begins:end].strip(), end

    def _arguments(self, argument: _Argument) -> tuple[str, int]:
        """The JSON of the arguments and the position after the call; see `_call`."""
        out, keys, exact, other, first = "{", set[str](), False, False, argument
        while True:
            pair = f"{',' if keys else ''}{orjson.dumps(argument.key).decode()}:"
            keys.add(argument.key)
            declared = argument_type(self._parameters, argument.key)
            close, held_at = self._value_end(argument)
            if close is None:
                return out + self._begun(pair, argument, declared, held_at), -1
            out += pair + self._json(argument, declared, close.at)
            following = close.then
            if following is None:
                return out, -1
            one_break = argument.on_lines and close.at == argument.value_at
            if self._is_exact(close):
                exact = True
                other = other or (one_break and argument is not first)
            elif isinstance(following, _Argument):
                other = True
            repeated = isinstance(following, _Argument) and following.key in keys
            if repeated or (exact and other and self._is_templates):
                return self._as_written(out, close)
            if isinstance(following, int):
                if self._is_templates and self._next(close) is _Next.OTHER_CALL:
                    return self._all_as_written(out, close)
                return out + "}", following
            argument = following

    def _is_exact(self, close: _Close) -> bool:
        """Whether the white space around a closing tag is the template's. The line break before it
        may be the one after the opening, where the template writes two."""
        if self._tags.on_lines and self._text[close.at - 1] != "\n":
            return False
        if isinstance(close.then, _Argument):
            return self._is_exact_argument(close.then)
        between = self._tags.between
        end = between + between.join(self._tags.ends)
        return self._text.startswith(end, close.at + len(self._tags.closes))

    def _next(self, close: _Close) -> _Next:
        """What follows the end of a call. After a call without arguments, which has no value that
        could be longer, what follows that one decides."""
        assert isinstance(close.then, int)
        after, exact = close.then, self._is_exact(close)
        while True:
            at = bisect_left(self._openings, after)
            if at == len(self._openings):
                return _Next.UNKNOWN if self._unfinished else _Next.TEXT
            begins = self._openings[at]
            if self._has_call_end(after, begins) or any(self._said(after, begins)):
                return _Next.TEXT
            named = self._tags.name.match(self._text, begins + len(self._tags.call))
            if named is None:
                return _Next.UNKNOWN if self._unfinished else _Next.TEXT
            exact = exact and self._text[after:begins] in self._joins and self._is_opening(named)
            first = self._argument(named.end())
            if isinstance(first, _Argument):
                exact = exact and self._is_exact_argument(first)
                if exact and self._tags.on_lines:
                    exact = not self._text.startswith(self._tags.closes, first.value_at)
                    if self._unfinished and self._cut(self._tags.closes, first.value_at):
                        return _Next.UNKNOWN
                return _Next.CALL if exact else _Next.OTHER_CALL
            end = self._ended(named.end())
            if not isinstance(end, int):
                is_cut = self._unfinished and (first is _CUT or end is _CUT)
                return _Next.UNKNOWN if is_cut else _Next.TEXT
            if not exact or self._text[named.end() : end] != self._empty:
                return _Next.OTHER_CALL
            after = end

    def _has_call_end(self, start: int, end: int) -> bool:
        at = bisect_left(self._call_ends, (start,))
        return at < len(self._call_ends) and self._call_ends[at][0] < end

    def _is_opening(self, named: re.Match[str]) -> bool:
        start, _, end = self._tags.opening.partition("{}")
        return named[0] == start + named["name"] + end

    def _is_exact_argument(self, argument: _Argument) -> bool:
        return argument.is_exact and (argument.on_lines or not self._tags.on_lines)

    def _all_as_written(self, out: str, close: _Close) -> tuple[str, int]:
        """The arguments, with the text from a closing tag to the last call's end as it is."""
        shut, end = self._call_ends[-1]
        return out + self._text[close.at : shut + len(self._tags.closes)], end

    def _as_written(self, out: str, close: _Close) -> tuple[str, int]:
        """The arguments, with the text from a closing tag to the call's end as it is."""
        if self._unfinished:
            return out, -1
        at = bisect_left(self._call_ends, (close.at,))
        shut, end = self._call_ends[at] if at < len(self._call_ends) else (len(self._text), -1)
        shut += len(self._tags.closes)
        return out + self._text[close.at : shut], end

    def _json(self, argument: _Argument, declared: ArgumentType, end: int) -> str:
        if self._tags.on_lines and end > argument.value_at and self._text[end - 1] == "\n":
            end -= 1
        text = self._text[argument.value_at : end]
        if argument.is_text is None:
            return declared.to_json(text, python_words=self._tags.python_words)
        if not argument.is_text:
            value = _JSON.to_json(text, python_words=False)
            # A value that ended before, and has another one in it, is left without its last quote.
            return value if self._tags.closes not in text or value == text.strip() else value[:-1]
        return orjson.dumps(text).decode()

    def _begun(self, pair: str, argument: _Argument, declared: ArgumentType, held_at: int) -> str:
        """The part of the last argument that is certain."""
        text = self._text[argument.value_at : held_at]
        if self._unfinished and self._tags.on_lines:
            text = text.removesuffix("\n")
        words = self._tags.python_words
        if argument.is_text is False or not (
            argument.is_text or declared.is_surely_text(text, python_words=words)
        ):
            return ""
        return pair + orjson.dumps(text).decode()[:-1]

    def _value_end(self, argument: _Argument) -> tuple[_Close | None, int]:
        """The tag that closes a value; or None, and up to where the value is certain."""
        strict = argument.on_lines and self._strict
        depth, possible = 0, list[_Close]()
        for mark in self._marks.finditer(self._text, argument.value_at):
            if mark[0] == self._tags.nests:
                depth += self._nested
                continue
            close, inner = self._close(mark), depth > 0
            depth -= inner
            if close is None:
                continue
            possible.append(close)
            if inner or (strict and not self._is_on_a_line(close, argument)):
                continue
            ends = self._ends_value(close)
            if ends is None:
                break
            if ends:
                return close, close.at
        held_at = possible[0].at if possible else self._without_begun_tag(argument.value_at)
        if self._unfinished:
            return None, held_at
        return self._other_end(possible, argument), len(self._text)

    def _other_end(self, possible: list[_Close], argument: _Argument) -> _Close | None:
        """The first of the possible ends, if none of them fits all rules."""
        found = [close for close in possible if self._ends_value(close)]
        on_lines = [close for close in found if self._is_on_a_line(close, argument)]
        self._nested = self._nested and not found
        self._strict = self._strict and (bool(on_lines) or not found)
        return next(chain(on_lines if argument.on_lines else (), found), None)

    def _is_on_a_line(self, close: _Close, argument: _Argument) -> bool:
        return close.at > argument.value_at and self._text[close.at - 1] == "\n"

    def _ends_value(self, close: _Close) -> bool | None:
        """Whether a tag that is no part of a nested pair ends the value; None: not known yet."""
        if close.then is None:
            return None if self._unfinished else True
        if isinstance(close.then, _Argument):
            return True
        if self._is_templates:
            following = self._next(close)
            if following in (_Next.CALL, _Next.UNKNOWN):
                return True if following is _Next.CALL else None
            if self._closes_more(close.then):
                return False
            return None if self._unfinished else True
        at = bisect_left(self._call_ends, (close.then,))
        if at < len(self._call_ends):
            return self._text.find(self._tags.call, close.then, self._call_ends[at][0]) >= 0
        another = self._unfinished and self._text.find(self._tags.call, close.then) >= 0
        return True if another or not self._unfinished else None

    def _closes_more(self, after: int) -> bool:
        """Whether from here on more calls are closed than opened, up to any place."""
        places, depths, least = self._depths
        at = bisect_left(places, after)
        return least[at] < depths[at]

    @cached_property
    def _openings(self) -> list[int]:
        """The positions of the tag that opens a call."""
        return [mark.start() for mark in re.finditer(re.escape(self._tags.call), self._text)]

    @cached_property
    def _depths(self) -> tuple[list[int], list[int], list[int]]:
        """The openings and the ends of calls, in order; the number of calls that are open before
        each of them, and at the end; and the least of these numbers from each on."""
        call, name = self._tags.call, self._tags.name
        begins = (at for at in self._openings if name.match(self._text, at + len(call)))
        steps = sorted([*((at, 1) for at in begins), *((at, -1) for at, _ in self._call_ends)])
        depths = list(accumulate((step for _, step in steps), initial=0))
        least = list(accumulate(reversed(depths), min))[::-1]
        return [at for at, _ in steps], depths, least

    @cached_property
    def _call_ends(self) -> list[tuple[int, int]]:
        """Each tag that closes a value and is followed by the end of a call: its position, and the
        position after the call."""
        found, at = [], self._text.find(self._tags.closes)
        while at >= 0:
            after = at + len(self._tags.closes)
            end = self._ended(after)
            if isinstance(end, int):
                found.append((at, end))
            at = self._text.find(self._tags.closes, after)
        return found

    def _close(self, mark: re.Match[str]) -> _Close | None:
        """None if neither an argument nor the end of a call follows."""
        argument = self._argument(mark.end())
        if isinstance(argument, _Argument):
            return _Close(mark.start(), argument)
        end = self._ended(mark.end())
        if isinstance(end, int):
            return _Close(mark.start(), end)
        return None if argument is None and end is None else _Close(mark.start(), None)

    def _argument(self, at: int) -> _Argument | _Cut | None:
        """The opening of an argument at this position; None, or `_CUT`."""
        opens, shuts = self._tags.key
        before = at
        at = begins = self._skipped(at)
        if not self._text.startswith(opens, at):
            return self._cut(opens, at)
        at += len(opens)
        key = self._key(at)
        if not isinstance(key, str):
            return key
        at = shut = at + len(key) + len(shuts)
        spaced = self._skipped(at)
        tag = next((tag for tag in self._tags.value if self._text.startswith(tag, spaced)), None)
        if tag is None:
            cuts = [self._cut(tag, spaced) for tag in self._tags.value]
            return next((cut for cut in cuts if cut is not None), None)
        at = spaced + len(tag) if tag else at
        if self._unfinished and at == len(self._text):
            return _CUT
        on_lines = self._tags.on_lines and self._text.startswith("\n", at)
        gap = self._tags.between if tag.startswith("<") else ""
        is_exact = self._text[before:begins] == self._tags.between
        is_exact = is_exact and (not tag or self._text[shut:spaced] == gap)
        known = tag == self._tags.value[0] if len(self._tags.value) > 1 else None
        key = self._own_key(key)
        return _Argument(begins, key, at + on_lines, known, on_lines, is_exact)

    def _key(self, at: int) -> str | _Cut | None:
        shuts = self._tags.key[1]
        for key in self._keys:
            if self._text.startswith(key + shuts, at):
                return key
            if self._cut(key + shuts, at) is not None:
                return _CUT
        end = self._text.find(shuts, at, at + MAX_KEY_CHARS)
        if end < 0:
            rest = self._text[at : at + MAX_KEY_CHARS]
            return None if len(rest) == MAX_KEY_CHARS or "\n" in rest else _CUT
        return None if "\n" in self._text[at:end] else self._text[at:end]

    def _own_key(self, key: str) -> str:
        """The name of an argument as it is declared, without white space around it if need be."""
        bare = key.strip()
        if bare == key:
            return key
        keys = declared_keys(self._parameters)
        return bare if bare in keys and key not in keys else key

    def _ended(self, at: int) -> int | _Cut | None:
        """The position after the end of a call that stands here; None, or `_CUT`."""
        for tag in self._tags.ends:
            at = self._skipped(at)
            if not self._text.startswith(tag, at):
                return self._cut(tag, at)
            at += len(tag)
        return at

    def _cut(self, tag: str, at: int) -> _Cut | None:
        """`_CUT` if the text ends within a tag that begins at this position, else None."""
        rest = self._text[at : at + len(tag)]
        return _CUT if len(rest) < len(tag) and tag.startswith(rest) else None

    def _skipped(self, at: int) -> int:
        """The position of the next character that is not white space."""
        found = _SPACE.match(self._text, at)
        assert found is not None
        return found.end()

    def _without_begun_tag(self, start: int) -> int:
        """The end of the text without a possible beginning of a closing tag."""
        tag, size = self._tags.closes, len(self._text)
        for held in range(min(len(tag) - 1, size - start), 0, -1):
            if self._text.endswith(tag[:held]):
                return size - held
        return size
