"""Sessions to export without their secrets: masked in texts and ids, and never marked for training.

A masked token keeps its place and has the id MASKED, so that every other token keeps its position
and its log-probability, which the model gave it with the secret before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from proxy.extras.export.protocol import Sample, TakesSessions
from proxy.extras.secrets import Known, SessionSecrets
from proxy.extras.secrets.tokens import Decode

MASKED = 0
"""A vocabulary of any size has this id."""


async def without_secrets(
    units: AsyncIterator[Sequence[Sample]],
    form: TakesSessions,
    decode: Decode | None,
    left_out: Counter[str],
) -> AsyncIterator[Sequence[Sample]]:
    """The units with masked secrets. Without `decode`, those are left out whose ids may spell some,
    unless the rows of the format hold none (`texts_only`)."""
    async for unit in units:
        known = Known()
        found = [SessionSecrets(decode, known=known) for _ in unit]
        for sample, secrets in zip(unit, found, strict=True):
            for session in (sample.session, *sample.origins):
                secrets.add_session(session)
            secrets.add(sample.turns)
        unread = len(known) > 0 or any(not t.request for each in unit for t in each.turns)
        if decode is None and unread and not getattr(form, "texts_only", False):
            left_out[_UNREAD] += len(unit)
            continue
        yield [
            replace(
                sample,
                session=secrets.masked_session(sample.session),
                turns=[secrets.masked(turn, MASKED) for turn in sample.turns],
                secrets=secrets,
            )
            for sample, secrets in zip(unit, found, strict=True)
        ]


_UNREAD = (
    "sessions whose token ids may spell secrets: name the checkpoint with the tokenizer"
    " (--model FOLDER), or export them as they are (--with-secrets)"
)
