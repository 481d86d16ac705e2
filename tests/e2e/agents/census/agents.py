"""The agents of the census: one entry each, with what its tools need to be called sensibly."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agent_loop.launchers.command import CommandConfig
from proxy.conversation import Conversation
from proxy.records import ForkCause, Turn
from tests.e2e.agents.census.hands import UNKNOWN, Hands, delegated, later, work
from tests.e2e.agents.census.policy import REPORT, SUB_TASK, Arguments, Call, Step
from tests.e2e.agents.census.schemas import Arguments as Drawn
from tests.e2e.agents.test_agents import AGENTS, ROOT, SCRIPTS, example

_REPORTS = Step(text=REPORT)


@dataclass(frozen=True, slots=True)
class Design:
    """A fork that is the agent's own: `matches` finds it by its cause and its request."""

    name: str
    matches: Callable[[Turn, Conversation], bool]
    proof: str
    """The captured request, or the line of the agent's source, that shows it."""


@dataclass(frozen=True, slots=True)
class Agent:
    """Example: Agent("codex", npm("@openai/codex"), …)"""

    name: str
    version: Callable[[Path], str]
    """The installed version, from the folder in which the agents are installed."""
    argvs: Sequence[Sequence[str]]
    """One after the other, in one workspace; `{prompt}` is `Part K: …` in the K-th with it."""
    env: Mapping[str, str]
    hands: Hands
    steps: Sequence[Step] = ()
    """Steps of its own, for tools that need sensible arguments. `{work}` is the workspace."""
    last: Step = _REPORTS
    """How the policy ends a part."""
    reports: Mapping[str, Arguments] = field(default_factory=dict)
    """The tool by which a sub-agent ends, if it has one, with its arguments."""
    opens: Mapping[str, Arguments] = field(default_factory=dict)
    """Calls that come first if their tools are offered: what they find is offered then, too."""
    checks_names: bool = True
    """It answers a call of an unknown tool; a script on an SDK may end with an error."""
    one_call: bool = False
    """It asks for one call per answer (`parallel_tool_calls: false`)."""
    text_only: bool = False
    """It offers no tools, and `steps` are texts."""
    designs: Sequence[Design] = ()
    program: str = ""
    """What the user installs, because no package index holds it: it is looked for on PATH."""
    root: Path = AGENTS
    """Where it is installed."""

    def is_installed(self) -> bool:
        return not self.program or shutil.which(self.program) is not None

    def command(self) -> CommandConfig:
        parts, script = 0, []
        for argv in self.argvs:
            if "{prompt}" in argv:
                parts += 1
            prompt = f"Part {parts}: do what is to be done."
            words = [prompt if word == "{prompt}" else word for word in argv]
            script.append(f'{shlex.join(words)} < /dev/null; echo "census: ended $?"')
        # What the script runs is named in the command, too: an agent reads only what is.
        paths = dict.fromkeys(w for argv in self.argvs for w in argv if w.startswith("/"))
        return CommandConfig(
            argv=("sh", "-c", "\n".join(script), "census", *paths), env=dict(self.env)
        )

    def plan(self, tools: list[dict[str, Any]], workspace: str, part: int) -> list[Step]:
        """The policy's steps in a part: its own ones, and every other tool twice."""
        offered = {tool["function"]["name"] for tool in tools}
        opening = [Step((each,)) for each in self.opens.items() if each[0] in offered]
        steps = [*opening, *self.work_plan(tools, workspace, part)]
        if self.text_only or part > 1:
            return steps
        made = Counter(name for step in steps for name, _ in step.calls)
        return [*steps, *self.drawn(tools, workspace, made)]

    def drawn(
        self, tools: list[dict[str, Any]], workspace: str, made: Counter[str]
    ) -> Iterator[Step]:
        """Each tool as often as it lacks of two calls, with arguments drawn from its schema."""
        for tool in tools:
            name, parameters = tool["function"]["name"], tool["function"].get("parameters") or {}
            if name in dict(self.last.calls):
                continue
            for awkward in (False, True)[made[name] :]:
                yield Step(((name, Drawn(workspace, awkward=awkward).of(parameters)),))

    def work_plan(self, _: list[dict[str, Any]], workspace: str, part: int) -> list[Step]:
        """The steps that do not come from the schemas of the tools."""
        if self.text_only:
            one_part = sum("{prompt}" in argv for argv in self.argvs) == 1
            return list(self.steps if one_part else self.steps[part - 1 : part])
        if part > 1:
            return later(self.hands, workspace, part)
        steps = [*work(self.hands, workspace), *([UNKNOWN] if self.checks_names else [])]
        return [*steps, *(_placed(step, workspace) for step in self.steps)]


def _placed(step: Step, workspace: str) -> Step:
    return replace(step, calls=json.loads(json.dumps(step.calls).replace("{work}", workspace)))


def npm(package: str, folder: str = "npm") -> Callable[[Path], str]:
    """The version of a package of npm."""

    def version(root: Path) -> str:
        file = root / folder / "node_modules" / package / "package.json"
        return str(json.loads(file.read_text())["version"])

    return version


def python(package: str, folder: str) -> Callable[[Path], str]:
    """The version of a package of PyPI."""

    def version(root: Path) -> str:
        found = next((root / folder).glob(f"lib/*/site-packages/{package}-*.dist-info"))
        return found.name.removesuffix(".dist-info").rpartition("-")[2]

    return version


def on_path(program: str) -> Callable[[Path], str]:
    """The version that a program on PATH says it has."""

    def version(_: Path) -> str:
        command = [program, "--version"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return said.split()[-1]

    return version


def _bash(name: str, **more: Any) -> Callable[[str], Call]:
    return lambda command: (name, {"command": command, **more})


def _files(
    shell: Callable[[str], Call],
    names: tuple[str, str, str],
    path: str = "file_path",
    content: str = "content",
    old: str = "old_string",
    new: str = "new_string",
) -> Hands:
    """For agents with tools `names` that read, write and replace text."""
    read, write, edit = names
    return Hands(
        shell,
        lambda file: (read, {path: file}),
        lambda file, text: (write, {path: file, content: text}),
        lambda file, before, after: (edit, {path: file, old: before, new: after}),
    )


def _one(name: str, **arguments: Any) -> Step:
    return Step(((name, arguments),))


def _keys(*keys: str, done: bool = False) -> str:
    """An answer of terminus-2's format: keystrokes."""
    commands = [{"keystrokes": each, "duration": 0.3} for each in keys]
    said = {"analysis": " é 😀", "plan": "Go on.", "commands": commands, "task_complete": done}
    return json.dumps(said, ensure_ascii=False, indent=1)


def _with(argv: Sequence[str], *more: str, without: Sequence[str] = ()) -> tuple[str, ...]:
    """The command with more words before its last one, which is the prompt."""
    kept = [word for word in argv if word not in without]
    return (*kept[:-1], *more, kept[-1])


def _sdk(root: Path, name: str, package: str, dialect: str = "chat") -> Agent:
    argv = (str(root / "python/bin/python"), str(SCRIPTS / f"{name}.py"))
    short = name.removesuffix("_agent")
    return Agent(
        f"{short}_{dialect}" if name in ("openai_sdk", "openai_agents") else short,
        python(package, "python"),
        (argv,),
        {"DIALECT": dialect},
        Hands.of_shell(_bash("run_command")),
        checks_names=False,
    )


def _opencode(name: str) -> Agent:
    command = example(name)
    return Agent(
        name,
        npm("opencode-ai"),
        (command.argv, _with(command.argv, "-c", without=("--title", "trial"))),
        command.env,
        _files(
            _bash("bash"),
            ("read", "write", "edit"),
            path="filePath",
            old="oldString",
            new="newString",
        ),
        (
            _one("todowrite", todos=[{"content": " a  é", "status": "pending", "priority": "low"}]),
            *delegated("task", {"description": "a part", "subagent_type": "general"}),
        ),
    )


_CODEX_STEPS = (
    _one("exec_command", cmd="cat -A", tty=True, yield_time_ms=1000),
    _one("write_stdin", session_id="{seen:session ID (\\d+)}", chars="hi é 😀\n"),
    _one("write_stdin", session_id="{seen:session ID (\\d+)}", chars="\u0004\u0004"),
    _one("view_image", path="{work}/picture.png"),
    _one("view_image", path="{work}/none.png"),
)


_DEFERRED = (
    *("CronCreate", "CronDelete", "CronList", "EnterWorktree", "ExitWorktree", "Monitor"),
    *("NotebookEdit", "SendMessage", "TaskStop", "WebFetch", "WebSearch"),
)
"""Tools that Claude Code 2.1.332 offers when its ToolSearch has found them."""


def agents(root: Path = AGENTS) -> dict[str, Agent]:
    """Every agent by its name; they are installed in `root`."""
    claude = example("claude_code")
    claude_argv = tuple(word for word in claude.argv if word != "--bare")
    codex = example("codex")
    qwen, pi, cline = example("qwen_code"), example("pi"), example("cline")
    gemini, kimi = example("gemini_cli"), example("kimi_code")
    goose, crush = example("goose"), example("crush")
    mini, hands, aider = example("mini_swe_agent"), example("openhands"), example("aider")
    all_agents = (
        Agent(
            "claude_code",
            npm("@anthropic-ai/claude-code"),
            (
                claude_argv,
                (*claude_argv, "-c"),
                tuple("/compact" if word == "{prompt}" else word for word in (*claude_argv, "-c")),
                (*claude_argv, "-c"),
            ),
            claude.env,
            _files(_bash("Bash", description="Runs it"), ("Read", "Write", "Edit")),
            (
                *delegated(
                    "Agent",
                    {"description": "a part", "subagent_type": "general-purpose"},
                    {"description": "a part", "run_in_background": False},
                ),
                _one("Bash", command="sleep 0.3; echo late", run_in_background=True),
                _one("TaskOutput", task_id="{seen:with ID: (\\w+)}", block=True, timeout=5000),
                _one("Bash", command="echo 5", timeout="5000", description=" é  "),
                _one("Read", file_path="{work}/long.txt", offset="2", limit="3"),
                _one("SendMessage", to="main", summary=" é", message="  a message\n"),
                _one("TaskCreate", subject="one é", description="  the first\n"),
                _one("TaskUpdate", taskId="1", status="in_progress"),
                _one("TaskUpdate", taskId="1", status="completed"),
            ),
            opens={"ToolSearch": {"query": f"select:{','.join(_DEFERRED)}", "max_results": 30}},
            designs=(
                Design(
                    "web search",
                    _mentions("Perform a web search for the query", ForkCause.NEW_CONVERSATION),
                    "WebSearch makes a call of its own, with the system prompt `You are an "
                    "assistant for performing a web search tool use`",
                ),
            ),
        ),
        Agent(
            "codex",
            npm("@openai/codex"),
            (codex.argv, (*codex.argv[:2], "resume", "--last", *codex.argv[2:])),
            codex.env,
            Hands.of_shell(lambda command: ("exec_command", {"cmd": command})),
            _CODEX_STEPS,
        ),
        Agent(
            "codex_default",
            npm("@openai/codex"),
            tuple(
                tuple(word for at, word in enumerate(argv) if not _names_model(argv, at))
                for argv in (codex.argv, (*codex.argv[:2], "resume", "--last", *codex.argv[2:]))
            ),
            codex.env,
            Hands.of_shell(lambda command: ("exec_command", {"cmd": command})),
            _CODEX_STEPS,
            one_call=True,
        ),
        _opencode("opencode"),
        _opencode("opencode_responses"),
        _opencode("opencode_messages"),
        Agent(
            "qwen_code",
            npm("@qwen-code/qwen-code"),
            (qwen.argv, _with(qwen.argv, "-c")),
            qwen.env,
            _files(
                _bash("run_shell_command", is_background=False, description="Runs it"),
                ("read_file", "write_file", "edit"),
            ),
            (
                *delegated("agent", {"description": "a part", "subagent_type": "general-purpose"}),
                _one("run_shell_command", command="sleep 0.3; echo late", is_background=True),
                _one("todo_write", todos=[{"content": "a  é", "status": "pending", "id": "1"}]),
            ),
            opens={
                "tool_search": {"query": "select:send_message"},
                "tool_call": {
                    "name": "send_message",
                    "arguments": {"to": "main", "message": "  a message é\n"},
                },
            },
            designs=(
                Design(
                    "memory",
                    _mentions("Managed memory directory", ForkCause.NEW_CONVERSATION),
                    "at its end an agent of its own writes its memory, with other tools and the "
                    "prompt `Managed memory directory: …`",
                ),
                Design(
                    "resumed session",
                    _mentions("Part 2: ", ForkCause.NEW_CONVERSATION),
                    "a resumed session begins with the folder's new listing",
                ),
            ),
        ),
        Agent(
            "gemini_cli",
            npm("@google/gemini-cli", "census"),
            (gemini.argv, (*gemini.argv, "-r", "latest")),
            gemini.env,
            replace(
                _files(_bash("run_shell_command"), ("read_file", "write_file", "replace")),
                edit=lambda path, old, new: (
                    "replace",
                    {
                        "file_path": path,
                        "instruction": "Replace it.",
                        "old_string": old,
                        "new_string": new,
                    },
                ),
            ),
            (
                *delegated("invoke_agent", {"agent_name": "generalist"}),
                _one("run_shell_command", command="sleep 0.3; echo late", is_background=True),
                _one("web_fetch", prompt="Read http://127.0.0.1:9/ "),
            ),
            reports={"complete_task": {"result": {"response": REPORT}}},
            designs=(
                Design(
                    "loop check",
                    _mentions("stuck in a repetitive, non-productive state", *ForkCause),
                    "after 30 turns of a prompt it asks whether the agent is in a loop "
                    "(`You are a diagnostic agent that determines whether …`)",
                ),
                Design(
                    "plan mode",
                    _mentions("enter_plan_mode", ForkCause.SYSTEM_CHANGED),
                    "enter_plan_mode gives it another system prompt (`Plan Mode`) and other tools",
                ),
                Design(
                    "resumed session",
                    _mentions("Part 2: ", ForkCause.NEW_CONVERSATION),
                    "a resumed session begins with the folder's new listing (`<session_context>`) "
                    "and has each tool result twice",
                ),
            ),
        ),
        Agent(
            "kimi_code",
            npm("@moonshot-ai/kimi-code", "census"),
            (kimi.argv, _with(kimi.argv, "-c", "-p", without=("-p",))),
            kimi.env,
            _files(_bash("Bash"), ("Read", "Write", "Edit"), path="path"),
            (
                _one("ReadMediaFile", path="{work}/picture.png"),
                *delegated("Agent", {"description": "a part"}),
                _one("Bash", command="sleep 0.3", run_in_background=True, description="waits"),
                _one("WaitFor", timeout="5", task_id="{seen:task_id: (\\S+)}"),
                _one("WaitFor", timeout=1, task_id=" é  "),
                _one("TaskOutput", task_id="{seen:task_id: (\\S+)}"),
            ),
            designs=(
                Design(
                    "resumed session",
                    _lacks_first("ReadMediaFile", "Part 2"),
                    "the first request of a resumed session lacks the tool ReadMediaFile, "
                    "which its next request offers again",
                ),
            ),
        ),
        Agent(
            "cline",
            npm("cline", "sdks"),
            # It ends after a few answers whose calls all fail, as those of the schemas do.
            (_with(cline.argv, "--retries", "50"),),
            cline.env,
            Hands(
                lambda command: ("run_commands", {"commands": [command]}),
                lambda path: ("read_files", {"files": [{"path": path}]}),
                lambda path, text: ("editor", {"path": path, "new_text": text}),
                lambda path, old, new: ("editor", {"path": path, "old_text": old, "new_text": new}),
            ),
            delegated("spawn_agent", {"systemPrompt": "You help."}, prompt="task"),
        ),
        Agent(
            "goose",
            npm("@aaif/goose-binary-linux-x64", "census"),
            tuple(
                (*goose.argv[:2], "--name", "trial", *more, *goose.argv[3:])
                for more in ((), ("--resume",))
            ),
            goose.env,
            replace(
                Hands.of_shell(_bash("shell")),
                write=lambda path, text: ("write", {"path": path, "content": text}),
                edit=lambda path, old, new: ("edit", {"path": path, "before": old, "after": new}),
            ),
            (
                _one("read_image", source="{work}/picture.png"),
                _one("read_image", source="{work}/none.png"),
                *delegated("delegate", {}, prompt="instructions"),
                _one("delegate", instructions=f"{SUB_TASK} LATER: é", **{"async": True}),
            ),
            designs=(
                Design(
                    "app",
                    _mentions("REQUESTED APP:", ForkCause.NEW_CONVERSATION),
                    "create_app and iterate_app ask in a conversation of their own (`Generate "
                    "standalone, single-file HTML applications`)",
                ),
                Design(
                    "resumed session",
                    _mentions("Part 2: ", ForkCause.EDITED),
                    "a resumed session has another code before the text of a failed call "
                    "(`-32603: -32600: Tool … was not advertised for this model turn`)",
                ),
            ),
        ),
        Agent(
            "crush",
            on_path("crush"),
            (crush.argv, (*crush.argv[:-1], "--continue", crush.argv[-1])),
            crush.env,
            _files(_bash("bash", description="Runs it"), ("view", "write", "edit")),
            delegated("agent", {}),
            program="crush",
        ),
        Agent(
            "mini_swe_agent",
            python("mini_swe_agent", "python"),
            (mini.argv,),
            mini.env,
            Hands.of_shell(_bash("bash")),
            last=_one("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
            designs=(
                Design(
                    "dropped unusable answer",
                    _mentions("Tool call error", ForkCause.ROLLED_BACK),
                    "an answer that it cannot use leaves its history; only a prompt `Tool call "
                    "error` stays (agents/default.py, FormatError)",
                ),
            ),
        ),
        Agent(
            "openhands",
            python("openhands", "openhands"),
            (hands.argv, (*hands.argv, "--resume", "--last")),
            hands.env,
            Hands(
                _bash("terminal", security_risk="LOW"),
                lambda path: _editor("view", path),
                lambda path, text: _editor("create", path, file_text=text),
                lambda path, old, new: _editor("str_replace", path, old_str=old, new_str=new),
            ),
            delegated("task", {"security_risk": "LOW", "description": "a part"}),
            last=_one("finish", message=REPORT),
        ),
        Agent(
            "pi",
            npm("@mariozechner/pi-coding-agent", "sdks"),
            (
                tuple(word.replace("--no-session ", "") for word in pi.argv),
                tuple(word.replace("--no-session", "-c") for word in pi.argv),
            ),
            pi.env,
            Hands(
                _bash("bash"),
                lambda path: ("read", {"path": path}),
                lambda path, text: ("write", {"path": path, "content": text}),
                lambda path, old, new: (
                    "edit",
                    {"path": path, "edits": [{"oldText": old, "newText": new}]},
                ),
            ),
        ),
        Agent(
            "aider",
            python("aider_chat", "aider"),
            (aider.argv, (*aider.argv, "--restore-chat-history")),
            aider.env,
            Hands.of_shell(_bash("none")),
            tuple(Step(text=f"I write it.\n\nout.txt\n```\n  é 😀 {n}\n```") for n in (1, 2)),
            text_only=True,
            designs=(
                Design(
                    "restored session",
                    _mentions("Part 2: ", ForkCause.NEW_CONVERSATION),
                    "`--restore-chat-history` reads the history from `.aider.chat.history.md`: "
                    "prompts without the reminder of the format, reasoning within the text, and "
                    "the message about files after them",
                ),
            ),
        ),
        Agent(
            "terminus_2",
            lambda _: python("harbor", ".harbor")(ROOT),
            ((str(ROOT / ".harbor/bin/python"), str(SCRIPTS / "terminus_2.py"), "{prompt}"),),
            {"HOME": "{directory}", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
            Hands.of_shell(_bash("none")),
            tuple(
                Step(text=_keys(*keys), files=files)
                for keys, files in (
                    (("printf '  é 😀 \\n' > out.txt\n",), {"out.txt": "  é 😀 \n"}),
                    (("cat out.txt\n", "ls 'none  \"here\"'\n"), {}),
                    (("seq 1 4000\n",), {}),
                    (("cat > in.txt\n", " <b>&amp;</b> \\n \n", "C-d"), {}),
                )
            ),
            last=Step(text=_keys(done=True)),
            text_only=True,
        ),
        _sdk(root, "openai_sdk", "openai"),
        _sdk(root, "openai_sdk", "openai", "responses"),
        _sdk(root, "anthropic_sdk", "anthropic", "messages"),
        _sdk(root, "openai_agents", "openai_agents", "responses"),
        _sdk(root, "openai_agents", "openai_agents", "chat"),
        _sdk(root, "pydantic_ai_agent", "pydantic_ai_slim"),
        _sdk(root, "langgraph_agent", "langgraph"),
    )
    return {agent.name: replace(agent, root=root) for agent in all_agents}


def _editor(command: str, path: str, **more: Any) -> Call:
    return ("file_editor", {"security_risk": "LOW", "command": command, "path": path, **more})


def _mentions(words: str, *causes: ForkCause) -> Callable[[Turn, Conversation], bool]:
    """Forks with one of the causes, and with the words in the last prompt or the last calls."""

    def matches(turn: Turn, conversation: Conversation) -> bool:
        texts = [m.text for m in conversation.messages if m.role != "tool"]
        calls = [call.name for m in conversation.messages for call in m.tool_calls]
        return turn.fork_cause in causes and any(words in t for t in (*texts[-3:], *calls[-2:]))

    return matches


def _lacks_first(tool: str, part: str) -> Callable[[Turn, Conversation], bool]:
    """The fork of a part's first request that lacks the tool, and that of the one after it, which
    has the answer to the first in its history."""

    def matches(turn: Turn, conversation: Conversation) -> bool:
        offered = any(each["function"]["name"] == tool for each in conversation.tools)
        tail = [m for m in conversation.messages[-8:] if m.role == "assistant"]
        begun = any(part in m.text for m in conversation.messages[-8:] if m.role == "user")
        cause = ForkCause.FOREIGN_ASSISTANT if offered else ForkCause.TOOLS_CHANGED
        return begun and turn.fork_cause is cause and len(tail) <= 2

    return matches


def _names_model(argv: Sequence[str], at: int) -> bool:
    return any(argv[i] == 'model="{model}"' for i in (at, at + 1) if i < len(argv))
