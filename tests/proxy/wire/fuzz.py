"""Coverage-guided bytes from libFuzzer through every dialect's parser.

For any bytes the parser returns a call that has keys, or refuses with the dialect's own 400.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["proxy"]):
    from proxy.conversation.message_keys import conversation_keys
    from proxy.errors import ProxyError
    from proxy.wire.body import Body, parse_body
    from proxy.wire.registry import open_dialects

DIALECTS = tuple(open_dialects().values())


def one_input(data: bytes) -> None:
    for dialect in DIALECTS:
        try:
            conversation_keys(dialect.parse(parse_body(Body(data)), {}).conversation)
        except ProxyError as refusal:
            if refusal.status not in (400, 404, 413):
                raise
            dialect.error(refusal)


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
