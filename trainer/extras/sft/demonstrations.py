"""Recorded sessions → demonstrations: their tokens, and which of them are answers to imitate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Literal

from agent_loop.errors import TrajectoryError
from agent_loop.records import Rollout, RolloutStatus, Segment, Task
from agent_loop.trajectory import build_segments, flatten
from proxy.config import RenderingConfig
from proxy.errors import ImageError, RequestError
from proxy.extras.export.images import loaded
from proxy.extras.export.protocol import Sample
from proxy.extras.export.selection import ExportSelection
from proxy.extras.secrets import SessionSecrets
from proxy.records import Turn
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import load_tokenizer
from proxy.settings.profiles import Profiles
from proxy.token_tree.rendered import NotRenderable, are_tokens_of, rendered_turns
from trainer.batch import Source
from trainer.errors import ConfigError
from trainer.extras.sft.config import SftConfig
from trainer.extras.sft.sources import open_source


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A recorded session to imitate.

    Example: Demonstration("sum-17", "recorded", Rollout("sum-17-9fJq", …), tokens=812, trained=96)
    """

    task_id: str
    source: Source
    rollout: Rollout
    tokens: int
    """Number of tokens, with shared prefixes counted once."""
    trained: int
    """Number of tokens of answers, without those of secrets."""
    secret: int = 0
    """Number of tokens of answers that spell a secret; they are context."""


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """The selected sessions in the order of `sft.sessions` and of their ids."""

    found: Sequence[Demonstration]
    left_out: Counter[str] = field(default_factory=Counter)
    """Reason → number of sessions that match the filters and cannot be trained on."""

    @property
    def digest(self) -> str:
        """Identifies the tokens and what is trained of them."""
        total = sha256()
        for each in self.found:
            total.update(each.rollout.trial_id.encode())
            for segment in each.rollout.segments:
                total.update(segment.ids.tobytes() + segment.mask.tobytes())
        return total.hexdigest()

    def describe(self) -> str:
        """Example: `203 sessions (203 recorded, 0 rendered), 41,210 tokens, 9,400 of answers`"""
        sources = Counter(each.source for each in self.found)
        tokens, trained, secret = (
            sum(getattr(each, name) for each in self.found)
            for name in ("tokens", "trained", "secret")
        )
        hidden = f"; {secret:,} tokens that spell secrets are not trained" if secret else ""
        left = "".join(f"; left out: {n} with {reason}" for reason, n in self.left_out.items())
        return (
            f"{len(self.found)} sessions ({sources['recorded']} with recorded ids, "
            f"{sources['rendered']} rendered), {tokens:,} tokens, {trained:,} of them answers"
            f"{hidden}{left}"
        )


class _Imitated:
    """What `ExportSelection` asks of a reader."""

    unit: Literal["session"] = "session"
    trains = needs_reward = False


async def read_demonstrations(
    config: SftConfig,
    model: Path,
    rendering: RenderingConfig,
    context_tokens: int,
    *,
    reads_images: bool = False,
) -> Demonstrations:
    """The selected sessions in the tokens of the checkpoint `model`. A session with a path of more
    than `context_tokens` tokens is left out, and one with images of a model that does not read
    them in training.

    Raises:
        ConfigError: no session can be trained on, or an image is not where its session is.
        ConfigurationError: a store cannot be opened, or the checkpoint has no usable tokenizer.
    """
    language = Rendering(load_tokenizer(model), rendering)
    found: dict[str, Demonstration] = {}
    left_out: Counter[str] = Counter()
    for name in config.sessions:
        async with open_source(name) as source:
            selection = ExportSelection(source, config.filters, _Imitated())
            async for (sample,) in selection.units():
                try:
                    if reads_images:
                        sample = await loaded(sample, source)
                    each = demonstration(
                        sample,
                        language,
                        ids=config.ids,
                        as_history=config.without_reasoning == "as_history",
                    )
                    _refuse_overlong(each.rollout.segments, context_tokens)
                except ImageError as error:
                    raise ConfigError(f"sft.sessions: {name}: {error}") from error
                except NotRenderable as reason:
                    left_out[str(reason)] += 1
                else:
                    found.setdefault(sample.session.session_id, each)
        left_out += selection.left_out
    demonstrations = Demonstrations(list(found.values()), left_out)
    if not found:
        raise ConfigError(
            f"sft.sessions={', '.join(config.sessions)}: {demonstrations.describe()}; check "
            f"sft.kind={config.kind} (a text-only engine records sessions of kind eval) and the "
            "other filters of the section sft"
        )
    return demonstrations


def demonstration(
    sample: Sample,
    rendering: Rendering,
    *,
    ids: Literal["auto", "rendered"] = "auto",
    as_history: bool = False,
) -> Demonstration:
    """The session's answers in the model's tokens: the recorded ones if the model's renderer reads
    and writes them like that, else rendered ones. Tokens that spell a secret are context.

    Raises:
        NotRenderable: the session has no answer, or nothing but secrets, or cannot be rendered for
            the model.
    """
    session, turns = sample.session, list(sample.turns)
    has_images = any(turn.images for turn in turns)
    if has_images and not sample.images:
        raise NotRenderable("images, which model.vision=text does not train")
    source: Source = "recorded"
    if ids == "rendered" or not are_tokens_of(turns, rendering):
        if has_images:
            raise NotRenderable("images, which are trained with recorded ids of the model alone")
        source = "rendered"
        follows = _follows(session.profile)
        turns = rendered_turns(turns, rendering, follows=follows, as_history=as_history)
    try:
        segments = build_segments(turns, imitated=True)
    except TrajectoryError as error:
        raise NotRenderable(f"inconsistent records ({error})") from error
    if not segments:
        raise NotRenderable("no answer")
    said = sum(int(segment.mask.sum()) for segment in segments)
    segments = _without_secrets(sample, turns, segments, rendering)
    trained = sum(int(segment.mask.sum()) for segment in segments)
    if not trained:
        raise NotRenderable("answers that are secrets")
    rollout = Rollout(
        session.session_id,
        Task(sample.task_id, {}),
        RolloutStatus.DONE,
        sample.reward,
        segments=segments,
        num_turns=len(turns),
        pictures={sha256: image.data for sha256, image in sample.images.items()},
    )
    tokens = sum(len(segment.ids) for segment in segments)
    return Demonstration(sample.task_id, source, rollout, tokens, trained, said - trained)


def _without_secrets(
    sample: Sample, turns: Sequence[Turn], segments: Sequence[Segment], rendering: Rendering
) -> tuple[Segment, ...]:
    secrets = SessionSecrets(rendering.tokenizer.decode)
    for session in (sample.session, *sample.origins):
        secrets.add_session(session)
    secrets.add(turns)
    found = secrets.of_pieces([segment.turns for segment in segments])
    return tuple(
        segment.training_only(~is_secret)
        for segment, is_secret in zip(segments, found, strict=True)
    )


def _refuse_overlong(segments: Sequence[Segment], context_tokens: int) -> None:
    longest = max(len(path.ids) for path in flatten(segments))
    if longest > context_tokens:
        raise NotRenderable(f"more than the model's context of {context_tokens} tokens")


def _follows(profile: str) -> bool:
    """Whether the prompt is what the agent sends. A profile of the recording proxy's own keeps what
    was sampled, like the default."""
    try:
        return Profiles({}).get(profile).follows
    except RequestError:
        return False
