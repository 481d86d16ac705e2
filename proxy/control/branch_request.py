"""Checks a request for a branch, and takes over the settings of the session that it begins with."""

from __future__ import annotations

from proxy.control.schema import NewSession, SessionLimits
from proxy.errors import RequestError, SessionError
from proxy.records import TurnStatus
from proxy.store.protocol import Store


async def with_origin(store: Store, new: NewSession) -> NewSession:
    """The request with everything that it takes over from the other session.

    Raises:
        SessionError: 404, the other session does not exist; 409, one of its turns has not ended.
        RequestError: it has fewer turns, or another profile.
    """
    if (of := new.branch_of) is None:
        return new
    session = await store.get_session(of.session)
    if session is None:
        raise SessionError(f"from: session {of.session!r} does not exist", status=404)
    turns = await store.get_turns(of.session, until=of.turn)
    if len(turns) < of.turn:
        raise RequestError(
            f"from.turn: {of.turn} turns are to be replayed, and session {of.session!r} has"
            f" {len(turns)}; give a number from 1 to {len(turns)}",
            param="from.turn",
        )
    still_open = [turn.index for turn in turns if turn.status is TurnStatus.OPEN]
    if still_open:
        raise SessionError(
            f"from: turn {still_open[0]} of session {of.session!r} has not ended; try again when "
            "it has",
            status=409,
        )
    if "profile" in new.model_fields_set and new.profile != session.profile:
        raise RequestError(
            f"profile: {new.profile!r} is given, and session {of.session!r} has"
            f" {session.profile!r}; a branch has the same profile, so leave it out",
            param="profile",
        )
    sampling = dict(session.sampling)
    taken_over = {
        "policies": sampling.pop("policies", {}),
        "kind": session.kind,
        "sampling": sampling,
        "profile": session.profile,
        "limits": SessionLimits.model_validate(dict(session.limits)),
    }
    missing = taken_over.keys() - new.model_fields_set
    return new.model_copy(update={name: taken_over[name] for name in missing})
