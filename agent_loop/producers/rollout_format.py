"""Serialises a `Group` for the replay buffer: msgpack, with arrays as raw little-endian bytes.

Invariant: `decode_group(encode_group(group))` equals `group`, and its arrays are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from agent_loop.kept_tokens import KeptTokens
from agent_loop.records import Group, Rollout, RolloutStatus, Segment, Task
from proxy.records import routed_experts
from proxy.records.binary import ImageFields, image_fields, images_of
from proxy.records.expert_rows import Routing

FORMAT = 1
"""Number of the format, increased when a field changes its meaning; other numbers are refused."""


def encode_group(group: Group) -> bytes:
    rollouts = [_encode(rollout) for rollout in group.rollouts]
    pictures = {name: data for r in group.rollouts for name, data in r.pictures.items()}
    return _ENCODER.encode(_Group(FORMAT, group.group_id, _task(group.task), rollouts, pictures))


def decode_group(data: bytes) -> Group:
    """The group, whose arrays are read-only views of `data`. Raises ValueError: another format."""
    fields = _DECODER.decode(data)
    if fields.format != FORMAT:
        raise ValueError(
            f"the group has format {fields.format}, but this version reads format {FORMAT}"
        )
    task = Task(**fields.task)
    rollouts = tuple(_decode(r, task, fields.pictures) for r in fields.rollouts)
    return Group(fields.group_id, task, rollouts)


class _Segment(msgspec.Struct, array_like=True):
    parent: int
    ids: bytes
    mask: bytes
    logprobs: bytes
    versions: bytes
    turns: bytes
    experts: bytes | None = None
    routed: bytes = b""
    kept: bytes | None = None
    images: list[ImageFields] = []


class _Rollout(msgspec.Struct, array_like=True):
    segments: list[_Segment]
    turn_returns: dict[int, float]
    truncated_turns: list[int]
    fields: dict[str, Any]


class _Group(msgspec.Struct, array_like=True):
    format: int
    group_id: str
    task: dict[str, Any]
    rollouts: list[_Rollout]
    pictures: dict[str, bytes] = {}
    """The images of all of its rollouts."""


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Group)

_PLAIN = (
    *("trial_id", "reward", "num_turns", "started_version", "error", "logs", "seed", "prefix"),
    *("started_at", "reward_of_turns"),
    *("reward_parts", "forks", "times_s", "metrics", "turn_shares", "turn_policies"),
    "stale_turns",
    "turn_calls",
)
"""Names of the rollout's fields that msgpack encodes without a conversion."""


def _task(task: Task) -> dict[str, Any]:
    named = {"agent": task.agent} if task.agent else {}
    return {"task_id": task.task_id, "data": dict(task.data), "source": task.source, **named}


def _encode(rollout: Rollout) -> _Rollout:
    plain = {name: getattr(rollout, name) for name in _PLAIN}
    mappings = {name: dict(value) for name, value in plain.items() if isinstance(value, dict)}
    return _Rollout(
        [
            _Segment(
                segment.parent,
                segment.ids.astype("<i4", copy=False).tobytes(),
                segment.mask.tobytes(),
                segment.logprobs.astype("<f4", copy=False).tobytes(),
                segment.versions.astype("<i4", copy=False).tobytes(),
                segment.turns.astype("<i4", copy=False).tobytes(),
                *_encode_routing(segment.routing),
                None if segment.kept is None else segment.kept.astype("<i4", copy=False).tobytes(),
                image_fields(segment.images),
            )
            for segment in rollout.segments
        ],
        dict(rollout.turn_returns),
        list(rollout.truncated_turns),
        {**plain, **mappings, "status": rollout.status.value},
    )


def _encode_routing(routing: Routing | None) -> tuple[bytes | None, bytes]:
    if routing is None:
        return None, b""
    return routed_experts.dump(routing.experts), routing.known.tobytes()


def _decode_routing(experts: bytes | None, known: bytes) -> Routing | None:
    rows = routed_experts.load(experts)
    return None if rows is None else Routing(rows, np.frombuffer(known, np.bool_))


def _decode_kept(segment: _Segment) -> KeptTokens | None:
    if segment.kept is None:
        return None
    rows = len(segment.mask)
    return np.frombuffer(segment.kept, "<i4").reshape(rows, -1)


def _decode(fields: _Rollout, task: Task, pictures: Mapping[str, bytes]) -> Rollout:
    plain = dict(fields.fields)
    segments = tuple(map(_decode_segment, fields.segments))
    named = {image.sha256 for segment in segments for image in segment.images}
    return Rollout(
        task=task,
        status=RolloutStatus(plain.pop("status")),
        segments=segments,
        turn_returns=fields.turn_returns,
        truncated_turns=tuple(fields.truncated_turns),
        pictures={name: pictures[name] for name in named & pictures.keys()},
        **plain,
    )


def _decode_segment(segment: _Segment) -> Segment:
    return Segment(
        segment.parent,
        np.frombuffer(segment.ids, "<i4"),
        np.frombuffer(segment.mask, np.bool_),
        np.frombuffer(segment.logprobs, "<f4"),
        np.frombuffer(segment.versions, "<i4"),
        np.frombuffer(segment.turns, "<i4"),
        _decode_routing(segment.experts, segment.routed),
        _decode_kept(segment),
        images_of(segment.images),
    )
