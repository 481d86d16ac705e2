"""Selected sessions → the rows of a format, with their images and without their secrets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from proxy.extras.export.images import ImageSource, with_images
from proxy.extras.export.private import without_secrets
from proxy.extras.export.protocol import ExportFormat, ImagesFound, LeftOut, Row, Sample
from proxy.extras.export.selection import ExportSelection
from proxy.extras.export.token_formats import is_restricted
from proxy.extras.secrets.tokens import Decode

Units = AsyncIterator[Sequence[Sample]]
_RESTRICTED = (
    "turns sampled with a grammar, top-k, top-p, min-p or penalties, of which no token is marked"
    " for training"
)


class Rows:
    """Example: [row async for row in Rows(selection, form, store, decode=decode)]"""

    def __init__(
        self,
        selection: ExportSelection,
        form: ExportFormat,
        source: ImageSource,
        *,
        decode: Decode | None = None,
        hides: bool = True,
    ) -> None:
        """`hides`: secrets are masked; see `without_secrets` for `decode`."""
        self._selection = selection
        self._form = form
        self._source = source
        self._decode = decode
        self._hides = hides

    def units(self) -> Units:
        """The sessions. Counts again what is left out."""
        left_out = self._selection.left_out
        left_out.clear()
        units = with_images(self._selection.units(), self._form, self._source, left_out)
        return without_secrets(units, self._form, self._decode, left_out) if self._hides else units

    async def __aiter__(self) -> AsyncIterator[Row]:
        """Raises ImagesFound, once: begin again, for the rows that the form has with images."""
        left_out = self._selection.left_out
        async for unit in self.units():
            if self._form.needs_reward and self._form.unit == "session":
                restricted = sum(is_restricted(turn) for each in unit for turn in each.turns)
                left_out.update({_RESTRICTED: restricted} if restricted else {})
            found, why = False, f"{self._form.unit}s with nothing to export in this format"
            try:
                for row in self._form.rows(unit):
                    found = True
                    yield row
            except ImagesFound:
                setattr(self._form, "shows_images", True)  # noqa: B010
                raise
            except LeftOut as reason:
                why = f"{self._form.unit}s with {reason}"
            if not found:
                left_out[why] += 1
