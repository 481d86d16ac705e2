"""The export formats by name. Any other name is an import path, `package.module:Name`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.plugins import load_plugin

if TYPE_CHECKING:
    from proxy.export.protocol import ExportFormat

FORMATS = {
    "messages": "proxy.export.message_formats:MessagesFormat",
    "sft": "proxy.export.token_formats:SftFormat",
    "dpo": "proxy.export.message_formats:DpoFormat",
    "trl": "proxy.export.token_formats:TrlFormat",
    "verl": "proxy.export.token_formats:VerlFormat",
    "prime-rl": "proxy.export.token_formats:PrimeRlFormat",
    "tinker": "proxy.export.token_formats:TinkerFormat",
    "skyrl": "proxy.export.token_formats:SkyRlFormat",
    "atif": "proxy.export.atif:AtifFormat",
    "tokens": "proxy.export.token_formats:TokensFormat",
}
RECORDS = "records"
"""The format that is not a table: one file per session, in the proxy's own binary form."""


def open_format(name: str) -> ExportFormat:
    """Raises ConfigurationError if the name is unknown or cannot be imported."""
    made: ExportFormat = load_plugin("--format", name, FORMATS)()
    return made
