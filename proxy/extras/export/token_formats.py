"""Formats whose rows hold the recorded tokens: one row per path of a session's token tree.

A path ends with its last sampled token. Paths without a token to train have no row. `prompt` below
is what comes before a path's first token to train, and `response` is the rest, in which the answers
of tools are masked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from proxy.extras.export.images import (
    IMAGE_LIST,
    data_url,
    encoded,
    ids_of_engine,
    image_type,
    images_along,
    refuse_images,
    seen_as_images,
)
from proxy.extras.export.protocol import LeftOut, Row, Sample
from proxy.records import Turn
from proxy.records.expert_rows import Routing, routing_along, routing_of
from proxy.records.routed_experts import dump_text
from proxy.sampling import untrainable
from proxy.token_tree.sampled_paths import SampledPath, sampled_paths

UNTRAINED = -100
"""The label of tokens without a loss, in PyTorch and TRL."""


class TokensFormat:
    """The record itself: ids, which of them were sampled, log-probabilities, versions, and the
    experts of a mixture: base64 of the `.npy` of `[T, layers, k]`, and which tokens have a row.
    `images` has where each image is in the ids, and the image. `restricted` marks sampled tokens
    whose log-probability is over what a grammar, top-k, top-p, min-p or penalties left, not over
    the whole vocabulary."""

    unit: Literal["session"] = "session"
    trains = needs_reward = False
    no_images: str | None = None

    def schema(self, pa: Any) -> Any:
        ints = pa.list_(pa.int32())
        image = {"offset": pa.int64(), "tokens": pa.int64(), "grid": ints}
        image |= {name: pa.string() for name in ("digest", "sha256", "media_type")}
        image |= {"image": image_type(pa)}
        return pa.schema(
            {
                "trial_id": pa.string(),
                "kind": pa.string(),
                "reward": pa.float64(),
                "rewards": pa.string(),
                "metadata": pa.string(),
                "turns": ints,
                "ids": ints,
                "sampled": pa.list_(pa.bool_()),
                "logprobs": pa.list_(pa.float32()),
                "versions": ints,
                "routed_experts": pa.string(),
                "routed": pa.list_(pa.bool_()),
                "images": pa.list_(pa.struct(image)),
                "restricted": pa.list_(pa.bool_()),
            }
        )

    def rows(self, samples: Sequence[Sample]) -> Iterator[Row]:
        (sample,) = samples
        session = sample.session
        rewards = [
            {"key": r.key, "value": r.value, "turn": r.turn, "branch": r.branch}
            for r in session.rewards
        ]
        routings = routing_of(sample.turns)
        for path in _paths(sample):
            routing = routing_along(sample.turns, routings, path.turns)
            yield {
                "trial_id": session.session_id,
                "kind": session.kind.value,
                "reward": sample.reward,
                "rewards": rewards,
                "metadata": dict(session.metadata),
                "turns": path.turns,
                "ids": ids_of_engine(path).tolist(),
                "sampled": path.sampled.tolist(),
                "logprobs": path.logprobs.tolist(),
                "versions": path.versions.tolist(),
                "routed_experts": None if routing is None else dump_text(routing.experts),
                "routed": None if routing is None else routing.known.tolist(),
                "images": [
                    {
                        "offset": each.offset,
                        "tokens": each.tokens,
                        "grid": list(each.grid),
                        "digest": each.digest,
                        "sha256": each.sha256,
                        "media_type": image.media_type,
                        "image": image,
                    }
                    for each, image in zip(path.images, images_along(sample, path), strict=True)
                ],
                "restricted": restricted_along(sample.turns, path).tolist(),
            }


class SftFormat:
    """TRL's `SFTTrainer`, with exact tokens: `input_ids`, and `labels` that are -100 for tokens
    that the policy did not sample."""

    unit: Literal["session"] = "session"
    trains, needs_reward = True, False
    no_images = "TRL's SFTTrainer takes none beside ids; use --format messages"

    def schema(self, pa: Any) -> Any:
        ids = pa.list_(pa.int64())
        return pa.schema({**_head(pa), "input_ids": ids, "labels": ids})

    def rows(self, samples: Sequence[Sample]) -> Iterator[Row]:
        for path, head in _trained(samples, whole=False):
            labels = np.where(path.sampled, path.ids, UNTRAINED)
            yield {**head, "input_ids": path.ids.tolist(), "labels": labels.tolist()}


class TrlFormat:
    """What a `rollout_func` of TRL's `GRPOTrainer` returns, one completion per row."""

    unit: Literal["session"] = "session"
    trains = needs_reward = True
    no_images = "TRL's rollout_func returns none; use --format messages"

    def schema(self, pa: Any) -> Any:
        ids = pa.list_(pa.int64())
        columns = {"prompt_ids": ids, "completion_ids": ids, "env_mask": ids}
        return pa.schema({**_head(pa), **columns, "logprobs": pa.list_(pa.float32())})

    def rows(self, samples: Sequence[Sample]) -> Iterator[Row]:
        for path, head in _trained(samples):
            prompt, response = _split(path)
            yield {
                **head,
                "prompt_ids": path.ids[prompt].tolist(),
                "completion_ids": path.ids[response].tolist(),
                "env_mask": path.sampled[response].astype(int).tolist(),
                "logprobs": _masked(path.logprobs, path)[response].tolist(),
            }


class VerlFormat:
    """verl's `AgentLoopOutput`."""

    unit: Literal["session"] = "session"
    trains = needs_reward = True
    no_images: str | None = None
    shows_images = False

    def schema(self, pa: Any) -> Any:
        ids = pa.list_(pa.int64())
        columns = {
            "prompt_ids": ids,
            "response_ids": ids,
            "response_mask": ids,
            "response_logprobs": pa.list_(pa.float32()),
            "routed_experts": pa.list_(pa.list_(pa.list_(pa.int16()))),
            "reward_score": pa.float64(),
            "num_turns": pa.int64(),
            "metrics": pa.struct({"generate_sequences": pa.float64()}),
            "extra_fields": pa.struct(
                {"trial_id": pa.string(), "task_id": pa.string(), "versions": ids}
            ),
        }
        if not self.shows_images:
            return pa.schema(columns)
        columns["multi_modal_data"] = pa.struct({"images": pa.list_(image_type(pa))})
        return seen_as_images(pa, columns, {"multi_modal_data": {"images": IMAGE_LIST}})

    def rows(self, samples: Sequence[Sample]) -> Iterator[Row]:
        refuse_images(self, samples)
        (sample,) = samples
        generate_s = sum(turn.duration_s or 0.0 for turn in sample.turns)
        routings = routing_of(sample.turns)
        for path, head in _trained(samples):
            prompt, response = _split(path)
            ids, images = ids_of_engine(path), images_along(sample, path)
            yield {
                "prompt_ids": ids[prompt].tolist(),
                "response_ids": ids[response].tolist(),
                "response_mask": path.sampled[response].astype(int).tolist(),
                "response_logprobs": _masked(path.logprobs, path)[response].tolist(),
                "routed_experts": _replayable(sample.turns, routings, path),
                "reward_score": head["reward"],
                "num_turns": len(path.turns),
                "metrics": {"generate_sequences": generate_s},
                "extra_fields": {
                    "trial_id": head["trial_id"],
                    "task_id": head["task_id"],
                    "versions": path.versions[response].tolist(),
                },
            } | (
                {"multi_modal_data": {"images": images} if images else None}
                if self.shows_images
                else {}
            )


class PrimeRlFormat:
    """prime-rl's `TrainingSample`."""

    unit: Literal["session"] = "session"
    trains = needs_reward = True
    no_images: str | None = None
    shows_images = False

    def schema(self, pa: Any) -> Any:
        floats = pa.list_(pa.float32())
        columns = {
            "token_ids": pa.list_(pa.int64()),
            "mask": pa.list_(pa.bool_()),
            "logprobs": floats,
            "temperatures": floats,
            "env_name": pa.string(),
            "advantages": floats,
        }
        if self.shows_images:
            place = pa.struct({"url": pa.string(), "offset": pa.int64(), "length": pa.int64()})
            columns["mm_refs"] = pa.struct({"images": pa.list_(place)})
            columns["mm_token_type_ids"] = pa.list_(pa.int64())
        return pa.schema(columns)

    def rows(self, samples: Sequence[Sample]) -> Iterator[Row]:
        refuse_images(self, samples)
        (sample,) = samples
        source = str(sample.session.metadata.get("source", "default"))
        for path, _ in _trained(samples):
            ids = ids_of_engine(path)
            yield {
                "token_ids": ids.tolist(),
                "mask": path.sampled.tolist(),
                "logprobs": _masked(path.logprobs, path).tolist(),
                "temperatures": path.temperatures.tolist(),
                "env_name": source,
                "advantages": (path.sampled * np.float32(sample.advantage)).tolist(),
            } | (_refs(sample, path) if self.shows_images else {})


class TinkerFormat:
    """The JSON of tinker's `Datum`, for its losses `importance_sampling`, `ppo` and `cispo`: the
    model sees all tokens but the last, and each position's target is the next token. An image is a
    chunk of its own, in PNG or JPEG."""

    unit: Literal["session"] = "session"
    trains = needs_reward = True
    no_images: str | None = None
    shows_images = False

    def schema(self, pa: Any) -> Any:
        ints, floats = pa.list_(pa.int64()), pa.list_(pa.float32())
        parts = {"type": pa.string(), "tokens": ints}
        if self.shows_images:
            parts |= {"data": pa.string(), "format": pa.string(), "expected_tokens": pa.int64()}
        chunk = pa.struct(parts)
        tensors = {
            name: pa.struct({"dtype": pa.string(), "shape": ints, "data": data})
            for name, data in (
                ("target_tokens", ints),
                ("logprobs", floats),
                ("advantages", floats),
            )
        }
        return pa.schema(
            {
                **_head(pa),
                "model_input": pa.struct({"chunks": pa.list_(chunk)}),
                "loss_fn_inputs": pa.struct(tensors),
            }
        )

    def rows(self, samples: Sequence[Sample]) -> Iterator[Row]:
        refuse_images(self, samples)
        (sample,) = samples
        if any(each.media_type not in _TINKER_FORMATS for each in sample.images.values()):
            raise LeftOut("images that are neither PNG nor JPEG, which tinker does not take")
        for path, head in _trained(samples):
            advantages = path.sampled * np.float32(sample.advantage)
            yield {
                **head,
                "model_input": {"chunks": _chunks(sample, path)},
                "loss_fn_inputs": {
                    "target_tokens": _tensor("int64", ids_of_engine(path)[1:]),
                    "logprobs": _tensor("float32", _masked(path.logprobs, path)[1:]),
                    "advantages": _tensor("float32", advantages[1:]),
                },
            }


class SkyRlFormat:
    """The columns of SkyRL's `GeneratorOutput`, one response per row."""

    unit: Literal["session"] = "session"
    trains = needs_reward = True
    no_images = (
        "SkyRL takes pixels that its model's processor has made, not images; use --format messages,"
        " or AgentGenerator with pixels"
    )

    def schema(self, pa: Any) -> Any:
        ids = pa.list_(pa.int64())
        trajectory = pa.struct({"instance_id": pa.string(), "repetition_id": pa.int64()})
        return pa.schema(
            {
                "prompt_token_ids": ids,
                "response_ids": ids,
                "loss_masks": ids,
                "rollout_logprobs": pa.list_(pa.float32()),
                "rewards": pa.float64(),
                "stop_reasons": pa.string(),
                "trajectory_ids": trajectory,
            }
        )

    def rows(self, samples: Sequence[Sample]) -> Iterator[Row]:
        (sample,) = samples
        for number, (path, head) in enumerate(_trained(samples)):
            prompt, response = _split(path)
            reason = sample.turns[path.turns[-1]].finish_reason
            yield {
                "prompt_token_ids": path.ids[prompt].tolist(),
                "response_ids": path.ids[response].tolist(),
                "loss_masks": path.sampled[response].astype(int).tolist(),
                "rollout_logprobs": _masked(path.logprobs, path)[response].tolist(),
                "rewards": head["reward"],
                "stop_reasons": "length" if reason == "length" else "stop",
                "trajectory_ids": {"instance_id": head["trial_id"], "repetition_id": number},
            }


def _trained(samples: Sequence[Sample], *, whole: bool = True) -> Iterator[tuple[SampledPath, Row]]:
    """The paths that have a token to train, each with the columns that name its session. `whole`:
    no token of an `is_restricted` turn counts as sampled, because the trainers of these formats
    compute probabilities over the whole vocabulary."""
    (sample,) = samples
    head = {
        "trial_id": sample.session.session_id,
        "task_id": sample.task_id,
        "reward": sample.reward,
    }
    for path in _paths(sample):
        if whole:
            path = path.without(restricted_along(sample.turns, path))
        if path.sampled.any():
            yield path.up_to_the_last_sampled(), head


def _paths(sample: Sample) -> Iterator[SampledPath]:
    """The session's paths, in which no token of a secret counts as sampled."""
    for path in sampled_paths(sample.turns):
        if sample.secrets is not None:
            yield path.without(sample.secrets.along(path.turns))
        else:
            yield path


def is_restricted(turn: Turn) -> bool:
    """Whether the turn's log-probabilities are over a part of the vocabulary, or over logits that
    were changed."""
    sampling = turn.sampling
    left = sampling.get("top_k", -1) > 0 or sampling.get("top_p", 1.0) < 1
    return left or "structured" in sampling or next(untrainable(sampling), None) is not None


def restricted_along(turns: Sequence[Turn], path: SampledPath) -> npt.NDArray[np.bool_]:
    """`[T]`: the sampled tokens of `is_restricted` turns."""
    found = np.zeros(len(path.ids), np.bool_)
    for index in path.turns:
        turn = turns[index]
        if is_restricted(turn):
            found[turn.prompt_tokens : turn.path_tokens] = True
    return found & path.sampled


def _split(path: SampledPath) -> tuple[slice, slice]:
    """The prompt and the response."""
    first = int(path.sampled.argmax())
    return slice(0, first), slice(first, len(path.ids))


_TINKER_FORMATS = {"image/png": "png", "image/jpeg": "jpeg"}


def _chunks(sample: Sample, path: SampledPath) -> list[Row]:
    """The path without its last token as tinker's chunks of text and of images."""
    chunks, at, end = list[Row](), 0, len(path.ids) - 1
    for span, image in zip(path.images, images_along(sample, path), strict=True):
        if span.offset > at:
            text = path.ids[at : span.offset].tolist()
            chunks.append({"type": "encoded_text", "tokens": text})
        chunks.append(
            {
                "type": "image",
                "data": encoded(image),
                "format": _TINKER_FORMATS[image.media_type],
                "expected_tokens": span.tokens,
            }
        )
        at = span.offset + span.tokens
    chunks.append({"type": "encoded_text", "tokens": path.ids[at:end].tolist()})
    return chunks


def _refs(sample: Sample, path: SampledPath) -> Row:
    """prime-rl's fields of a path with images: where each is, and which tokens are of an image."""
    if not path.images:
        return {"mm_refs": None, "mm_token_type_ids": None}
    places = [
        {"url": data_url(image), "offset": span.offset, "length": span.tokens}
        for span, image in zip(path.images, images_along(sample, path), strict=True)
    ]
    kinds = (path.ids < 0).astype(int).tolist()
    return {"mm_refs": {"images": places}, "mm_token_type_ids": kinds}


def _replayable(
    turns: Sequence[Turn], routings: Sequence[Routing | None], path: SampledPath
) -> list[list[list[int]]] | None:
    """`[T - 1, layers, k]`, the experts up to the token before the path's last one; None if one of
    these tokens has no row, because verl would replay expert 0 for it."""
    routing = routing_along(turns, routings, path.turns)
    before = slice(0, len(path.ids) - 1)
    if routing is None or not routing.known[before].all():
        return None
    experts: list[list[list[int]]] = routing.experts[before].tolist()
    return experts


def _masked(values: Any, path: SampledPath) -> Any:
    return np.where(path.sampled, values, np.float32(0))


def _tensor(dtype: str, values: Any) -> Row:
    return {"dtype": dtype, "shape": [len(values)], "data": values.tolist()}


def _head(pa: Any) -> Row:
    return {"trial_id": pa.string(), "task_id": pa.string(), "reward": pa.float64()}
