"""Keys of single persons, and which sessions each opens.

A person's sessions are those whose ids begin with the person's name and a slash, which nothing
changes later: those that were created with the person's key, and those that the administrator gave
such an id. Invariant: with a person's key, a route that is not declared for it (`Route.own`) is
refused, and a session of anybody else does not exist, whatever names it: the path, the query, or
the body of a request for a new session.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from proxy.errors import ConfigurationError, RequestError, SessionError
from proxy.http.route import Route
from proxy.keys import KeyFile, kept_key

PERSON = "person"
"""The entry of a session's metadata that names its person, which only the administrator changes."""


@dataclass(frozen=True, slots=True)
class Scope:
    """The sessions that whoever makes a request may use. Example: Scope("ann").has("ann/7")"""

    person: str = ""
    """Empty: all sessions."""

    @property
    def prefix(self) -> str:
        """With which the ids of the sessions begin."""
        return f"{self.person}/" if self.person else ""

    def has(self, session_id: str) -> bool:
        return session_id.startswith(self.prefix)

    def narrowed(self, id_prefix: str) -> str | None:
        """The prefix of those of the sessions whose ids begin with this; None: there are none."""
        if self.has(id_prefix):
            return id_prefix
        return self.prefix if self.prefix.startswith(id_prefix) else None

    def check(self, session_id: str) -> None:
        """Raises SessionError (404): it is not one of the sessions, or would not be one."""
        if not self.has(session_id):
            raise SessionError(
                f"session {session_id!r} does not exist, or is not {self.person}'s: the ids of"
                f" {self.person}'s sessions begin with {self.prefix!r}",
                status=404,
            )

    def admit(self, route: Route, request: web.Request) -> None:
        """
        Raises:
            SessionError: the request is not for the person's own sessions: 403, the route is not
                for persons; 404, it names another session.
        """
        request[SCOPE] = self
        if not self.person:
            return
        if not route.own:
            raise SessionError(
                f"the key of {self.person} opens own sessions only; this needs the admin key",
                status=403,
            )
        named = request.query.getall("session", [""] if "session" in route.query else [])
        if "trial_id" in request.match_info:
            named = [*named, request.match_info["trial_id"]]
        for session_id in named:
            self.check(session_id)
        if request.query.get("run"):
            raise SessionError("run: the sessions of runs are the administrator's", status=404)

    def check_tags(self, tags: Mapping[str, str]) -> None:
        """Raises RequestError: a person changes whose session it is."""
        if self.person and PERSON in tags:
            raise RequestError(f"tag {PERSON!r}: only the administrator changes it", status=403)


EVERYTHING = Scope()
SCOPE = web.RequestKey("scope", Scope)
"""Of a request that a door has admitted."""


class PersonKeys:
    """The keys of `people`. Example: PersonKeys({"ann": Path("ann.key")}).person_of("a-key")"""

    def __init__(self, files: Mapping[str, Path]) -> None:
        """Creates the files that do not exist.

        Raises:
            ConfigurationError: a file cannot be created or read, is empty, or two have one key.
        """
        self._files: dict[str, KeyFile] = {}
        first: dict[str, str] = {}
        for name, path in files.items():
            try:
                key = kept_key(path.expanduser())
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigurationError(
                    f"people.{name}: {path} cannot be used: {error}"
                ) from error
            if not key:
                raise ConfigurationError(
                    f"people.{name}: {path} is empty; remove it, or write a key"
                )
            if other := first.get(key):
                raise ConfigurationError(f"people.{name}: {path} has the key of {other}")
            first[key] = name
            self._files[name] = KeyFile(path.expanduser(), [key])

    def person_of(self, key: str) -> str:
        """Whose key it is; empty: nobody's."""
        found = [name for name, file in self._files.items() if file.accepts(key)]
        return found[0] if found else ""

    def current(self) -> list[tuple[str, bytes]]:
        """`(person, key)` of each key that is valid now."""
        return [(name, key) for name, file in self._files.items() for key in file.current()]
