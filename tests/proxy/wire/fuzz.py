"""Coverage-guided bytes from libFuzzer through every dialect's parser.

    python -m tests.proxy.wire.fuzz -max_total_time=600 [CORPUS]

For any bytes the parser returns a call that has keys, or refuses with the dialect's own 400,
whether the model reads images or not. The fuzzer begins with ordinary bodies, which have images.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["proxy"]):
    from proxy.conversation.images import named
    from proxy.conversation.message_keys import conversation_keys
    from proxy.errors import ProxyError
    from proxy.settings.profiles import Profiles
    from proxy.wire.body import Body, parse_call
    from proxy.wire.images import SentImages
    from proxy.wire.registry import open_dialects

from tests.attacks.bodies import BODIES

DIALECTS = tuple(open_dialects().values())
PROFILE = Profiles({}).get("default")


def one_input(data: bytes) -> None:
    for dialect in DIALECTS:
        for images in (None, SentImages()):
            try:
                call = parse_call(dialect, Body(data), {}, PROFILE, images=images)
            except ProxyError as refusal:
                if refusal.status not in (400, 404, 413):
                    raise
                dialect.error(refusal)
                continue
            conversation_keys(call.conversation)
            found = set() if images is None else images.found.keys() | images.linked.keys()
            assert found >= set(named(call.conversation.messages)), "an image without its bytes"


if __name__ == "__main__":
    seeds = Path(tempfile.mkdtemp())
    for number, body in enumerate(BODIES.values()):
        (seeds / str(number)).write_text(json.dumps(body()), encoding="utf-8")
    atheris.Setup([*sys.argv, str(seeds)], one_input)
    atheris.Fuzz()
