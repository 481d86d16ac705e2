"""The export formats by name. Any other name is an import path, `package.module:Name`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.settings.plugins import load_plugin

if TYPE_CHECKING:
    from proxy.extras.export.protocol import ExportFormat

FORMATS = {
    "messages": "proxy.extras.export.message_formats:MessagesFormat",
    "sft": "proxy.extras.export.token_formats:SftFormat",
    "dpo": "proxy.extras.export.message_formats:DpoFormat",
    "trl": "proxy.extras.export.token_formats:TrlFormat",
    "verl": "proxy.extras.export.token_formats:VerlFormat",
    "prime-rl": "proxy.extras.export.token_formats:PrimeRlFormat",
    "tinker": "proxy.extras.export.token_formats:TinkerFormat",
    "skyrl": "proxy.extras.export.token_formats:SkyRlFormat",
    "atif": "proxy.extras.export.atif:AtifFormat",
    "tokens": "proxy.extras.export.token_formats:TokensFormat",
}
RECORDS = "records"
"""The format that is not a table: one file per session, in the proxy's own binary form."""


def open_format(name: str) -> ExportFormat:
    """Raises ConfigurationError if the name is unknown or cannot be imported."""
    made: ExportFormat = load_plugin("--format", name, FORMATS)()
    return made
