"""A scripted engine as a separate process that can be killed: arguments CHECKPOINT PORT DELAY_S.

Each answer contains the length of its prompt, so that all answers of a conversation differ. A
prompt that contains POISON ends the process before its first token.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from proxy.config import RenderingConfig
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import load_tokenizer
from proxy.testing.scripted_engine import ScriptedEngine, text_script

POISON = "This request ends its engine."


def answer(prompt: str) -> str:
    if POISON in prompt:
        os._exit(1)
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
