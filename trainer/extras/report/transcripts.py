"""Trials to read: their conversations with the tokens of each answer, and what judged them.

Invariant: a transcript has at most MAX_TURNS turns, MAX_TOKENS tokens, and texts of bounded length,
whatever agents and models wrote; what is left out is counted. One session at a time is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from proxy.conversation.images import shown
from proxy.extras.view.answers import TokensPage
from proxy.extras.view.bounded import turn_json
from proxy.extras.view.masking import Masking
from proxy.extras.view.run_folder import RecordedRun
from proxy.extras.view.session_turns import SessionTurns
from proxy.extras.view.turn_tokens import TurnTokens, shown_text, turn_tokens
from proxy.records import EMPTY_IDS, Ids, Turn
from proxy.rendering.tokenizer import Tokenizer
from proxy.run_files.trial_files import VERIFIER_FILES, FilePiece, TrialFiles
from proxy.store.browser import Browser, TurnHead
from proxy.token_tree.paths import common_prefix
from trainer.extras.report.trials import Trial
from trainer.run.metrics import Transcript

MAX_TURNS = 24
"""The first ones and the last ones of a conversation: about ten pages of paper."""
MAX_TOKENS = 1500
TEXT_CHARS = 2_000
MESSAGES = 20
"""New messages of one turn."""
HEADS = 2_000
"""Turns of a session among which the longest conversation is looked for."""
SHOWN_BEFORE, SHOWN_AFTER = 8, 12
"""Tokens around the point where two prompts part."""
VERIFIER_BYTES = 3_000
"""Of each file that the verifier wrote."""


class Transcripts:
    """Example: await Transcripts(run, store.browser, tokenizer).side("before", trial)"""

    def __init__(
        self, run: RecordedRun, browser: Browser | None, tokenizer: Tokenizer | None
    ) -> None:
        """Without a browser no session is known. Without a tokenizer, answers are shown as the
        messages that the agent got."""
        self._run = run
        self._masking = Masking()
        self._browser = browser and self._masking.of(browser, tokenizer)
        self._tokenizer = tokenizer

    async def side(self, label: str, trial: Trial) -> dict[str, Any]:
        """One trial as JSON (`ReportSide` of the page)."""
        chain, left_out = await self._conversation(trial["trial_id"])
        shown = chain
        if len(chain) > MAX_TURNS:
            shown = [*chain[: MAX_TURNS // 2], *chain[-(MAX_TURNS // 2) :]]
            left_out = f"{len(chain) - MAX_TURNS} turns in the middle are left out."
        named = trial["trial_id"]
        files = verifier_output(self._run.files(named))
        return {
            "label": label,
            "trial": await self._masking.pieces(self._browser, named, trial),
            "turns": await self._turns(named, chain, shown),
            "left_out": left_out,
            "verifier": await self._masking.pieces(self._browser, named, files),
        }

    async def parting(self, one: str, other: str) -> str:
        """How much of the first prompts of two sessions is the same, and what differs first, in
        words; empty if they are equal or unknown. Something early that differs by trial (a folder,
        a date, an id) costs prefill and training time."""
        prompts = [await self._first_prompt(session) for session in (one, other)]
        if self._tokenizer is None or not all(map(len, prompts)):
            return ""
        shared, size = common_prefix(*prompts), max(map(len, prompts))
        if shared == min(map(len, prompts)):
            return ""
        begins = max(0, shared - SHOWN_BEFORE)
        first, second = (
            shown_text(prompt[begins : shared + SHOWN_AFTER], self._tokenizer) for prompt in prompts
        )
        return (
            f"Their first prompts share {shared:,} of {size:,} tokens and part at "
            f"\N{LEFT DOUBLE QUOTATION MARK}{first}\N{RIGHT DOUBLE QUOTATION MARK} and "
            f"\N{LEFT DOUBLE QUOTATION MARK}{second}\N{RIGHT DOUBLE QUOTATION MARK}."
        )

    async def _first_prompt(self, session: str) -> Ids:
        heads = [] if self._browser is None else await self._browser.heads(session, 0, 1)
        if self._browser is None or not heads:
            return EMPTY_IDS
        return (await SessionTurns(self._browser, session).read(heads[0].index)).prompt_ids

    async def _conversation(self, session: str) -> tuple[list[Turn], str]:
        """The turns of the longest conversation, and why there are none."""
        if self._browser is None:
            return [], "The run has no sessions.db."
        heads = await self._browser.heads(session, 0, HEADS)
        if not heads:
            return [], "The session is no longer in sessions.db, or no call was recorded."
        longest = max(heads, key=_length)
        turns = SessionTurns(self._browser, session)
        return await turns.conversation(longest.index), ""

    async def _turns(
        self, session: str, chain: Sequence[Turn], shown: Sequence[Turn]
    ) -> list[dict[str, Any]]:
        if not chain or self._browser is None:
            return []
        path = await SessionTurns(self._browser, session).path(chain[-1].index)
        tokens, left = turn_tokens(path), MAX_TOKENS
        made = []
        # The answer to a request that another turn repeats is not part of the conversation.
        retried = {turn_json(turn, 0, 0)["same_as"] for turn in chain}
        for turn in shown:
            told = turn_json(turn, TEXT_CHARS, MESSAGES)
            answer, page, more = None, None, 0
            if turn.index not in retried:
                page, more = self._answer_tokens(session, tokens, turn, left)
                left -= len(page["ids"]) if page else 0
                answer = None if page else told["answer"]
            names = ("index", "messages", "more_messages")
            kept: dict[str, Any] = {name: value for name, value in told.items() if name in names}
            made.append(kept | {"answer": answer, "tokens": page, "more_tokens": more})
        return made

    def _answer_tokens(
        self, session: str, tokens: TurnTokens, turn: Turn, most: int
    ) -> tuple[TokensPage | None, int]:
        """The tokens that a turn sampled, and the number of those that are left out. None if their
        text is not known, or the conversation went on without them."""
        spans = [span for span in tokens.spans if span.sampled and span.turn == turn.index]
        if self._tokenizer is None or not spans or most <= 0:
            return None, 0
        start, end = spans[0].start, spans[-1].end
        page = tokens.page(start, min(end - start, most), self._tokenizer)
        shown = len(page["ids"])
        if (trained := self._run.tokens.of(session)) is not None:
            page["trained"] = trained.page(tokens.spans, start, start + shown)
        return page, end - start - shown


def _length(head: TurnHead) -> tuple[int, int]:
    return head.shared_tokens + head.new_tokens + head.sampled_tokens, head.index


def as_text(side: Mapping[str, Any]) -> Transcript:
    """What a side shows, for services that keep text."""
    trial = side["trial"]
    facts = (
        f"{trial['task_id']} · {trial['kind']} at step {trial['step']} · reward "
        f"{trial['reward']} · {trial['turns']} turns · {trial['sampled_tokens']} tokens sampled · "
        f"{trial['status']}"
    )
    parts = [part for turn in side["turns"] for part in _turn_text(turn)]
    parts += [f"[{each['name']}]\n{each['text']}" for each in side["verifier"]]
    text = "\n\n".join([*parts, side["left_out"]]).strip()
    # A lone surrogate, which JSON can hold, would end whatever writes the text.
    plain = (each.encode(errors="replace").decode() for each in (trial["trial_id"], facts, text))
    return Transcript(*plain)


def _turn_text(turn: Mapping[str, Any]) -> Iterator[str]:
    for message in (*turn["messages"], *([turn["answer"]] if turn["answer"] else ())):
        calls = [
            f"{call['name']} {_beginning(call['arguments'])}" for call in message["tool_calls"]
        ]
        yield "\n".join([f"[{message['role']}]", _beginning(message["text"]), *calls])
    if turn["tokens"]:
        yield "[assistant, sampled]\n" + "".join(turn["tokens"]["texts"])


def _beginning(text: str | Mapping[str, Any]) -> str:
    return shown(text if isinstance(text, str) else f"{text['text']} …")


def verifier_output(files: TrialFiles) -> list[dict[str, Any]]:
    """The ends of the files that judged a trial."""
    return [
        {"name": end["name"], "text": _whole(end)}
        for end in files.ends(VERIFIER_FILES, VERIFIER_BYTES)
    ]


def _whole(end: FilePiece) -> str:
    text = end["text"].strip()
    return f"… {end['from']} bytes before are left out\n{text}" if end["from"] else text
