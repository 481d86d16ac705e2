"""The scripted policy: it calls each tool that an agent offers, and does the work of a long day.

It reads the conversation that it answers from the session's own record, and writes its answer in
the format of the model's family. What it says depends on who asks:

    the main agent    the steps of the part that the last prompt of the user names (`Part 2`)
    a sub-agent       one command, and a report
    anyone else       a summary if one is requested, or else a short text

Invariant: a prompt that is sent again gets the same answer, and a prompt that ends in the middle of
an answer gets the rest of it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from proxy.conversation import Conversation, Message, ToolCall
from proxy.conversation.recorded import load_conversation
from proxy.records import FOLDER
from proxy.testing.scripted_engine import Fault
from tests.e2e.agents.census.families import Writer
from tests.proxy.conftest import RunningProxy

SUB_TASK = "Sub-task"
"""What the prompt of every sub-agent begins with."""
SUMMARY = "<summary>\nEverything so far went well; what is left is in the next message.\n</summary>"
_ASKED = re.compile(rf"(?s).*(?:\bPart (?P<part>\d+): |{SUB_TASK})")
"""Matches a text up to its last prompt: from its start, because a search would take the square of a
long text's length."""
_ASKS_SUMMARY = re.compile(r"(?i)(?<![</])summar|checkpoint|compact|state_snapshot")
REPORT = "It is done. 🙂"

Arguments = Mapping[str, Any]
Call = tuple[str, Arguments]


@dataclass(frozen=True, slots=True)
class Step:
    """One answer: calls, or a text if there are none.

    An argument `{seen:PATTERN}` becomes the pattern's first group in the last result that has it.

    Example: Step((("Bash", {"command": "ls"}),), files={"out.txt": "hi\\n"})
    """

    calls: Sequence[Call] = ()
    text: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    """What files of the workspace have to contain once the calls have run."""


Plan = Callable[[list[dict[str, Any]], str, int], list[Step]]
"""The main agent's tools, its workspace, and the number of the part → the steps."""
Drawing = Callable[[list[dict[str, Any]], str, Counter[str]], Iterator[Step]]
"""The main agent's tools, its workspace, and the number of calls of each tool → more steps."""


@dataclass(slots=True)
class Written:
    """An answer as the policy wrote it."""

    session: str
    turn: int
    role: str
    answer: Message


class Policy:
    """The script of an engine. `written` has every answer."""

    def __init__(
        self,
        proxy: RunningProxy,
        writer: Writer,
        plan: Plan,
        late: Drawing | None,
        shell: Callable[[str], Call],
        *,
        trials: Path,
        last: Step,
        reports: Mapping[str, Arguments],
        text_only: bool,
        one_call: bool,
        dies_at: int | None = None,
    ) -> None:
        """`trials`: the folder of the trials' directories. `late`: what follows the first part's
        plan, for tools that the agent offered later. `shell`: a command → the call that runs it,
        for sub-agents. `last` ends a part. `reports`: the tool by which a sub-agent ends, if it has
        one, with its arguments. `text_only`: the agent offers no tools. `one_call`: an answer has
        one call at most. `dies_at`: the answer in whose middle the engine's connection breaks."""
        self._trials = trials
        self._last = last
        self._reports = reports
        self._text_only = text_only
        self._one_call = one_call or not writer.family.several_calls
        self._dies_at = dies_at
        self._proxy = proxy
        self._writer = writer
        self._plan = plan
        self._late = late
        self._shell = shell
        self._steps: dict[int, Iterator[Step]] = {}
        self._answers: dict[tuple[int, ...], list[int]] = {}
        self.written: list[Written] = []
        self.errors: list[str] = []
        self.wrong_files: list[str] = []
        self._expected: dict[str, str] = {}

    async def __call__(self, prompt_ids: list[int]) -> list[int]:
        rest = self._rest(prompt_ids)
        if rest is not None:
            return rest
        call = next(c for c in reversed(self._proxy.engine.calls) if c.prompt_ids is prompt_ids)
        session_id, _, turn = call.request_id.rpartition("#")
        index = int(turn.partition(".")[0])
        session, turns = await self._proxy.control.get_turns(session_id)
        found = load_conversation(turns, index)
        if found is None:
            raise ValueError(f"turn {index} of {session_id} has no conversation")
        if role_of(found.conversation) == "main":  # the last step's calls have run
            self._check_files(self._trials / session_id / "work")
        seen = f"{session.metadata[FOLDER]}/work"
        role, answer = self._answer(found.conversation, seen)
        schema = None if answer.tool_calls else _answer_schema(turns[index].sampling)
        if role == "side" and schema is not None:
            answer = Message("assistant", json.dumps(_least(schema)), answer.reasoning)
        self.written.append(Written(session_id, index, role, answer))
        ids = self._writer.ids(answer, found.conversation.tools)
        self._answers[tuple(prompt_ids)] = ids
        if len(self.written) == self._dies_at:
            call.fault = Fault("die", after_tokens=len(ids) // 2)
        return ids

    def _rest(self, prompt_ids: list[int]) -> list[int] | None:
        for prompt, answer in self._answers.items():
            done = len(prompt_ids) - len(prompt)
            if 0 <= done <= len(answer) and tuple(prompt_ids) == (*prompt, *answer[:done]):
                return answer[done:]
        return None

    def _answer(self, conversation: Conversation, workspace: str) -> tuple[str, Message]:
        role = role_of(conversation)
        if role == "summary":
            return role, Message("assistant", SUMMARY, "I sum up.")
        if role == "sub-agent":
            return role, self._sub_agent(conversation)
        part = _part(conversation)
        if part is None or not (conversation.tools or self._text_only):
            return "side", Message("assistant", REPORT, "Nothing to do.")
        return role, self._main(conversation, workspace, part)

    def _sub_agent(self, conversation: Conversation) -> Message:
        names = {tool["function"]["name"] for tool in conversation.tools}
        if conversation.messages[-1].role == "tool" or not conversation.tools:
            ends = names.intersection(self._reports)
            report = Step(tuple((name, self._reports[name]) for name in ends), text=REPORT)
            return _message(report, "The command has run.")
        call = self._shell("echo '  from a sub-agent é 😀' >> parts.txt")
        return _message(Step((call,)), "I do my part.")

    def _main(self, conversation: Conversation, workspace: str, part: int) -> Message:
        if part not in self._steps:
            self._steps[part] = self._one_by_one(self._plan(conversation.tools, workspace, part))
        step = next(self._steps[part], None)
        if step is None and self._late is not None and part == 1:
            late = self._late(offered_tools(conversation), workspace, self.counts())
            self._steps[part] = self._one_by_one(list(late))
            step = next(self._steps[part], None)
        step = step or self._last
        self._expected = dict(step.files)
        results = [m.text for m in reversed(conversation.messages) if m.role == "tool"]
        return _message(_filled(step, results), "What is next?")

    def _one_by_one(self, steps: Sequence[Step]) -> Iterator[Step]:
        """The steps, with one call each if an answer has only one."""
        for step in steps:
            if not self._one_call or len(step.calls) < 2:
                yield step
                continue
            for call in step.calls[:-1]:
                yield Step((call,))
            yield Step(step.calls[-1:], files=step.files)

    def _check_files(self, workspace: Path) -> None:
        expected, self._expected = self._expected, {}
        for name, text in expected.items():
            try:
                found = (workspace / name).read_bytes().decode()
            except OSError as error:
                found = str(error)
            if found != text:
                self.wrong_files.append(f"{name}: {found!r} instead of {text!r}")

    def counts(self) -> Counter[str]:
        """Number of calls that the policy made of each tool."""
        return Counter(call.name for each in self.written for call in each.answer.tool_calls)


def role_of(conversation: Conversation) -> str:
    """Who asks: the `main` agent or something `side` of it, a `sub-agent`, or the agent's client,
    for a `summary`."""
    last = conversation.messages[-1]
    if last.role == "user" and _ASKS_SUMMARY.search(last.text) and not _ASKED.match(last.text):
        return "summary"
    asked = _last_prompt(conversation)
    if asked is None:
        return "side"
    return "main" if asked["part"] else "sub-agent"


def offered_tools(conversation: Conversation) -> list[dict[str, Any]]:
    """The tools of a request, and those that the results of tool searches in it describe."""
    tools = {tool["function"]["name"]: tool for tool in conversation.tools}
    results = [message.text for message in conversation.messages if message.role == "tool"]
    for line in "\n".join(text for text in results if '"input_schema":' in text).split("\n"):
        found = json.loads(line) if line.startswith('{"name"') else {}
        if "input_schema" in found:
            function = {"name": found["name"], "parameters": found["input_schema"]}
            tools.setdefault(found["name"], {"type": "function", "function": function})
    return list(tools.values())


def _answer_schema(sampling: Any) -> dict[str, Any] | None:
    """The JSON Schema that an answer has to have, wherever it stands in the sampling parameters."""
    if isinstance(sampling, str) and sampling.startswith("{"):
        sampling = json.loads(sampling)
    if isinstance(sampling, Mapping):
        schema = sampling.get("json_schema", sampling.get("json"))
        if isinstance(schema, dict) and schema.keys() & {"type", "properties"}:
            return schema
        sampling = list(sampling.values())
    found = map(_answer_schema, sampling) if isinstance(sampling, list) else iter(())
    return next((each for each in found if each is not None), None)


def _least(schema: Mapping[str, Any]) -> Any:
    """A value of the schema that says as little as possible: no, none, 0."""
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type", "object")
    if kind == "object":
        return {name: _least(each) for name, each in schema.get("properties", {}).items()}
    return {"array": [], "number": 0, "integer": 0, "boolean": False}.get(kind, REPORT)


def _part(conversation: Conversation) -> int | None:
    asked = _last_prompt(conversation)
    return int(asked["part"]) if asked and asked["part"] else None


def _last_prompt(conversation: Conversation) -> re.Match[str] | None:
    texts = (m.text for m in reversed(conversation.messages) if m.role != "tool")
    return next((found for found in map(_ASKED.match, texts) if found), None)


def _filled(step: Step, results: Sequence[str]) -> Step:
    return replace(step, calls=[(name, _fill(given, results)) for name, given in step.calls])


def _fill(value: Any, results: Sequence[str]) -> Any:
    if isinstance(value, list):
        return [_fill(each, results) for each in value]
    if isinstance(value, Mapping):
        return {name: _fill(each, results) for name, each in value.items()}
    if not isinstance(value, str) or not value.startswith("{seen:"):
        return value
    found = (re.search(value[len("{seen:") : -1], result) for result in results)
    seen: str = next((each[1] for each in found if each), "0")
    return int(seen) if seen.isdigit() else seen


def _message(step: Step, thought: str) -> Message:
    calls = [
        ToolCall(f"call_{at}", name, json.dumps(arguments, ensure_ascii=False))
        for at, (name, arguments) in enumerate(step.calls)
    ]
    return Message("assistant", step.text, thought, calls)
