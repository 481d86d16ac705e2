"""`make fuzz`: bytes that libFuzzer makes up, coverage-guided, through every dialect's parser.

Whatever they are, the parser returns a call that has keys, or refuses with the dialect's own 400.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["proxy"]):
    from proxy.conversation import conversation_keys
    from proxy.data_plane import parse_json
    from proxy.errors import ProxyError
    from proxy.recent import Recent
    from proxy.wire.chat import ChatDialect
    from proxy.wire.completions import CompletionsDialect
    from proxy.wire.dialect import Dialect
    from proxy.wire.fields import MIN_BYTES, Request
    from proxy.wire.messages import MessagesDialect
    from proxy.wire.responses import ResponsesDialect

DIALECTS: tuple[Dialect, ...] = (
    ChatDialect(),
    CompletionsDialect(),
    MessagesDialect(),
    ResponsesDialect(),
)


def one_input(data: bytes) -> None:
    recent = Recent()
    for dialect in DIALECTS:
        for _ in range(2):  # the second time it goes on from the first
            try:
                request = Request(parse_json(data), recent, dialect.name, MIN_BYTES)
                conversation = dialect.parse(request, {}).conversation
                conversation.known = request.keys
                conversation_keys(conversation)
            except ProxyError as refusal:
                if refusal.status not in (400, 404):
                    raise
                dialect.error(refusal)


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
