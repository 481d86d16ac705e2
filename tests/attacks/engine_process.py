"""A scripted engine as a separate process that can be killed: arguments CHECKPOINT PORT DELAY_S.

Each answer contains the length of its prompt, so that all answers of a conversation differ. A
prompt that contains POISON ends the process before its first token, with the exit code POISONED.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from proxy.config import RenderingConfig
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import load_tokenizer
from proxy.testing.scripted_engine import ScriptedEngine, text_script

POISON = "This request ends its engine."
POISONED = 86
"""No other end of the process has this exit code."""


def answer(prompt: str) -> str:
    if POISON in prompt:
        # Its clients see this a moment before its parent sees its end, on a busy machine always.
        os.closerange(3, 1024)
        time.sleep(0.2)
        os._exit(POISONED)
    return f"That is {len(prompt)} characters, thank you."


async def main(checkpoint: Path, port: int, token_delay_s: float) -> None:
    rendering = Rendering(load_tokenizer(checkpoint), RenderingConfig())
    script = text_script(
        answer,
        decode=rendering.tokenizer.decode,
        encode=rendering.tokenizer.encode,
        end_ids=rendering.stop_token_ids[:1],
    )
    engine = ScriptedEngine(script, token_delay_s=token_delay_s, remember_calls=False)
    sys.stdout.write(f"{await engine.start(port=port)}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
