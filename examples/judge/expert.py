"""The scripted judge whose judgements the warm-up of the judge's model trains on.

It sees what `remote_agent.judge` shows: the order and the agent's own messages, without the results
of its tools. So it can check what was looked up, how the counts enter the calculation and the form
of the answer, but neither a price nor a sum.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import yaml

from agent_loop.extras.judge.reward import PROMPT
from examples.quickstart.shop import GOODS, Order, new_question, price_line, total_line
from examples.starter_model.transcripts import Transcript
from proxy.conversation.messages import Message, ToolCall, dump_answer

_SETTINGS = yaml.safe_load(Path(__file__).with_name("judge.yaml").read_text(encoding="utf-8"))
CRITERIA: str = _SETTINGS["remote_agent"]["judge"]["criteria"]

# Probability of each mistake of the judged agent. About half of the judged trials are right.
_FORGETS_THING = 0.2
_ASKS_FOR_ANOTHER = 0.05
_ASKS_TWICE = 0.05
_SKIPS_CALCULATION = 0.1
_ADDS_ALL_COUNTS = 0.1
_ADDS_ONE_COUNT = 0.05
_CHANGES_COUNT = 0.05
_ANSWERS_NO_TOTAL = 0.1


@dataclass(frozen=True)
class Judged:
    """What the judge sees of a trial.

    Example: Judged({"hats": 8}, ("hats",), "8*4", "total: 32")
    """

    order: Order
    asked: tuple[str, ...]
    """The things whose price was looked up, in order."""
    expression: str | None
    """What was calculated; None: nothing was."""
    answer: str


def transcript(rng: random.Random) -> Transcript:
    """One trial as `remote_agent.judge` shows it, and the judgement."""
    task = new_question(rng)
    judged = _trial(task["order"], task["prices"], rng)
    prompt = PROMPT.format(
        task=task["prompt"],
        answers="\n".join(_lines(judged, rng)),
        criteria=CRITERIA,
        low=0.0,
        high=1.0,
    )
    return Transcript(
        [
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": judgement(judged)},
        ],
        [],
    )


def judgement(judged: Judged) -> str:
    """One line for each thing of the order, one for the answer, and the reward."""
    terms = judged.expression.split("+") if judged.expression else []
    lines, right = [], True
    for place, (thing, count) in enumerate(judged.order.items()):
        asked = thing in judged.asked
        times = place < len(terms) and terms[place].startswith(f"{count}*")
        right = right and asked and times
        lines.append(
            f"{thing} {count}: {'looked up' if asked else 'forgotten'}, "
            f"{'times' if times else 'not times'}"
        )
    total = judged.answer.startswith("total: ")
    lines.append("answer: total" if total else "answer: no total")
    return "\n".join([*lines, f"Reward: {int(right and total)}"])


def _trial(order: Order, prices: dict[str, int], rng: random.Random) -> Judged:
    asked: list[str] = []
    for thing in order:
        if asked and rng.random() < _FORGETS_THING:
            break
        wanted = rng.choice(GOODS) if rng.random() < _ASKS_FOR_ANOTHER else thing
        asked += [wanted, wanted] if rng.random() < _ASKS_TWICE else [wanted]
    expression = None
    if rng.random() >= _SKIPS_CALCULATION:
        expression = _expression(order, len(set(asked)), prices, rng)
    answer = total_line(rng.randint(6, 162))
    if rng.random() < _ANSWERS_NO_TOTAL:
        thing = rng.choice(asked)
        answer = rng.choice((price_line(thing, prices[thing]), expression or "", ""))
    elif expression is None:
        answer = price_line(asked[-1], prices[asked[-1]])
    return Judged(order, tuple(asked), expression, answer)


def _expression(order: Order, terms: int, prices: dict[str, int], rng: random.Random) -> str:
    add_all = rng.random() < _ADDS_ALL_COUNTS
    written = []
    for thing, count in list(order.items())[:terms]:
        seen = rng.randint(2, 9) if rng.random() < _CHANGES_COUNT else count
        add = add_all or rng.random() < _ADDS_ONE_COUNT
        written.append(f"{seen}{'+' if add else '*'}{prices[thing]}")
    return "+".join(written)


def _lines(judged: Judged, rng: random.Random) -> list[str]:
    calls = [("price", {"item": thing}) for thing in judged.asked]
    if judged.expression is not None:
        calls.append(("calculate", {"expression": judged.expression}))
    return [_line("", call, rng) for call in calls] + [_line(judged.answer, None, rng)]


def _line(text: str, call: tuple[str, dict[str, str]] | None, rng: random.Random) -> str:
    """A message as the proxy records it."""
    calls = []
    if call is not None:
        call_id = f"call_{rng.getrandbits(80):020x}0000"
        calls = [ToolCall(call_id, call[0], json.dumps(call[1]))]
    return dump_answer(Message("assistant", text, tool_calls=calls)).decode()
