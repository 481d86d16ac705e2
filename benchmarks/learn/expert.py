"""The scripted expert of the warm-up: it does every task, in one of the ways at random.

Its transcripts contain exactly the messages that mini-swe-agent, or Claude Code, sends.
"""

from __future__ import annotations

import json
import random
from datetime import date, timedelta
from pathlib import Path

import yaml

from benchmarks.learn.world import GIT_TOOL, NOTES_CHANGE, STYLES, Job, new_job
from examples.claude_code import expert as claude
from examples.mini_swe_agent.expert import SUBMIT, SYSTEM, TOOLS, observation
from examples.repositories import experts
from examples.starter_model.transcripts import Message, Transcript

PROMPTS = Path(__file__).with_name("prompts.yaml")
CLAUDE_PROMPT = "You are in a Git repository."
"""What Claude Code is given as --system-prompt, after its own first line."""


def transcript(rng: random.Random) -> Transcript:
    """One run of the agent on one task."""
    job = new_job(rng)
    messages: list[Message] = begin(job)
    for line in commands(job, rng):
        answer = call(line, len(messages))
        call_id = answer["tool_calls"][0]["id"]
        result = {"role": "tool", "tool_call_id": call_id, "content": observation("")}
        messages += [answer, result]
    messages.append(call(SUBMIT, len(messages)))
    return Transcript(messages, TOOLS)


def claude_transcript(rng: random.Random) -> Transcript:
    """One run of Claude Code, with its Bash alone, on one task."""
    job, day = new_job(rng), date(2026, 1, 1) + timedelta(days=rng.randrange(1500))
    system = f"{claude.SYSTEM.splitlines()[0]}\n{CLAUDE_PROMPT}"
    asked = claude.asked(job.prompt, day.isoformat())
    run = experts.Run([{"role": "system", "content": system}, asked])
    for line in commands(job, rng):
        run.call("Bash", claude.NOTHING, command=line)
    done = {"role": "assistant", "content": claude.DONE}
    return Transcript([*run.messages, done], claude.TOOLS[:1])


def begin(job: Job) -> list[Message]:
    """The first messages of the agent, as mini-swe-agent writes them."""
    config = yaml.safe_load(PROMPTS.read_text(encoding="utf-8"))
    template: str = config["agent"]["instance_template"]
    text = template.replace("{{task}}", job.prompt).removesuffix("\n")
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


def commands(job: Job, rng: random.Random) -> list[str]:
    """A way to do the task."""
    found = [job.change(git=rng.random() < GIT_TOOL)]
    if rng.random() < NOTES_CHANGE:
        found.append(job.note())
    shares = [share for _, share in STYLES.values()]
    return [*found, job.commit(rng.choices(list(STYLES), shares)[0])]


def call(line: str, number: int) -> Message:
    function = {"name": "bash", "arguments": json.dumps({"command": line})}
    made = {"id": f"call_{number}", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [made]}
