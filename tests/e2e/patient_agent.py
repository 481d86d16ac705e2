"""An agent that reads only its environment. It reports to its observer after each of several turns.

It writes the number of turns that were answered to standard output, and goes on when it reads a
line from standard input. Its SDK retries by itself, as every agent's does.
"""

from __future__ import annotations

import os
import sys

from openai import OpenAI

TURNS = 4


def main() -> None:
    client = OpenAI(max_retries=20)
    messages: list[dict[str, str]] = [{"role": "user", "content": "Say something."}]
    for turn in range(TURNS):
        reply = client.chat.completions.create(
            model=os.environ["AGENT_MODEL"],
            messages=messages,  # type: ignore[arg-type]
            max_tokens=24,
        )
        messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
        messages.append({"role": "user", "content": f"Go on, part {turn + 2}."})
        print(turn + 1, flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main()
