"""Code blocks of the README and docs/: commands exist, configurations load, Python compiles."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from proxy.cli import main as proxy_main
from proxy.config import ProxyConfig
from proxy.extras.relay.worker_config import WorkerConfig
from tests.docs_words import users_pages
from tests.pages import PAGES, ROOT, Block, all_blocks, name_of
from trainer.algorithms.advantages import Grpo
from trainer.cli import main as trainer_main
from trainer.config import TrainerConfig
from trainer.extras.learn.config import LearnConfig

FILE_NAME = re.compile(
    r"`((?:proxy|agent_loop|trainer|harbor_sdk|docker|examples|benchmarks|tests)/[\w/.-]+\.\w+)`"
)
# The module that parses each command's flags.
COMMANDS = {
    "agentic-proxy": "proxy",
    "agentic-worker": "proxy/extras/relay",  # flags are the fields of WorkerConfig
    "agentic-train": "trainer",
    "agentic-swarm": "agent_loop/extras/swarm",
    "harbor-server": "harbor_sdk/server",
}
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M))
PROGRAMS: dict[str, Callable[[list[str]], int]] = {
    "agentic-proxy": proxy_main,
    "agentic-train": trainer_main,
}
# Placeholders of required keys that a block leaves out because it is about something else.
REQUIRED = {
    "model": {"path": "/models/qwen3"},
    "data": {"train_files": ["tasks.jsonl"]},
    "remote_agent": {"command": {"argv": ["agent"]}},
}


class Median(Grpo):
    """The advantage that docs/notes/adding_a_part.md names."""

    name: str = "median"  # type: ignore[assignment]
    floor: float = 0.0


def command_lines(block: Block) -> list[list[str]]:
    """Words of each line, without comments, variables in front, and `. activate` lines."""
    lines = block.text.replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    bare = [[word for i, word in enumerate(line) if i or "=" not in word] for line in words]
    return [line[1:] if line and "=" in line[0] else line for line in bare if line]


def known_flags(command: str) -> set[str]:
    if command == "agentic-worker":
        return {f"--{name.replace('_', '-')}" for name in WorkerConfig.model_fields}
    files = (ROOT / COMMANDS[command]).rglob("*.py")
    return set(re.findall(r'"(--[a-z][a-z-]*)"', "\n".join(file.read_text() for file in files)))


@pytest.mark.parametrize("block", all_blocks("bash"), ids=str)
def test_commands_and_their_flags_exist(block: Block) -> None:
    for line in command_lines(block):
        command, *rest = line
        name = Path(command).name
        if name == "make":
            targets = {word for word in rest if "=" not in word}
            assert targets <= TARGETS, targets - TARGETS
        elif name in COMMANDS:
            own = takewhile(lambda word: word != "--", rest)  # an agent's command may follow
            flags = {word.partition("=")[0] for word in own if word.startswith("--")}
            assert flags <= known_flags(name), flags - known_flags(name)
        elif command == "python" and rest[0] == "-m":
            assert importlib.util.find_spec(rest[1]), rest[1]
        elif command.startswith("examples/"):
            assert (ROOT / command).exists(), command


@pytest.mark.parametrize("block", all_blocks("yaml"), ids=str)
def test_configurations_load_in_their_model(block: Block) -> None:
    # Parts of a user's own package are imported when the configuration loads.
    text = block.text.replace("my_package.advantages:Median", "tests.test_docs:Median")
    values = yaml.safe_load(text)
    if "apiVersion" in values:
        kubernetes_validate.validate(values, "1.33", strict=True)
    elif "recorder" in values:
        LearnConfig.model_validate(values)
    elif values.keys() <= ProxyConfig.model_fields.keys() and "data" not in values:
        ProxyConfig.model_validate({"model": "/models/qwen3", **values})
    else:
        required = {
            k: v for k, v in REQUIRED.items() if k != "remote_agent" or "agents" not in values
        }
        TrainerConfig.model_validate({**required, **values})


@pytest.mark.parametrize("block", all_blocks("python"), ids=str)
def test_python_compiles_and_imports_what_exists(block: Block) -> None:
    tree = ast.parse(block.text)
    tree.body = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    exec(compile(tree, block.page, "exec"), {})


@pytest.mark.parametrize("block", all_blocks("toml"), ids=str)
def test_toml_is_valid(block: Block) -> None:
    assert tomllib.loads(block.text)


@pytest.mark.parametrize("page", users_pages(), ids=name_of)
def test_users_page_names_no_commit(page: Path) -> None:
    """What was measured at which commit is a note."""
    text = page.read_text("utf-8")
    hashes = re.findall(r"`[0-9a-f]{7,40}`", text)
    assert not hashes


def test_pages_that_the_code_names_exist() -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "*.py", "*.yaml", "*.sh", "*.toml", "*.md", "Makefile"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    files = [ROOT / name for name in tracked if not name.startswith(("docs/", "CHANGELOG"))]
    named = {
        (file.name, page)
        for file in files
        if file.exists()
        for page in re.findall(r"docs/[a-z_/-]+\.md", file.read_text("utf-8"))
    }
    assert named
    assert not {(file, page) for file, page in named if not (ROOT / page).exists()}


def test_readme_links_every_users_page() -> None:
    linked = set(re.findall(r"\]\((docs/[^)#]+\.md)", (ROOT / "README.md").read_text("utf-8")))
    pages = {name_of(page) for page in users_pages()} - {"README.md", "docs/index.md"}
    assert pages <= linked, pages - linked


def test_readme_has_the_ladder_and_a_picture() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert text.count("![") == 1
    rungs = re.findall(r"^\| ([a-z-]+) \| `(agentic-\w+) (\S+)", text, re.M)
    names = ["record", "look", "collect", "fine-tune", "train", "compare"]
    assert [name for name, *_ in rungs] == names
    assert "`make train ARGS=trainer.steps=" in text  # how to make it shorter
    for _, program, word in rungs:
        with pytest.raises(SystemExit) as ended:
            PROGRAMS[program]([word, "--help"] if word.isalpha() else ["--help"])
        assert ended.value.code == 0, (program, word)


def test_built_pages_need_no_other_host() -> None:
    """Theme and search are of this site; a diagram of Mermaid's, or a font, would be fetched."""
    settings = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert "  font: false" in settings
    assert not re.search(r"mermaid|extra_javascript|extra_css|https?://", settings)
    assert [block for block in all_blocks("bash", "mermaid") if block.language == "mermaid"] == []
    fetched = re.compile(r"!\[[^]]*\]\(https?://|<(?:img|script|link|iframe)\b[^>]*https?://")
    assert not [name_of(page) for page in PAGES if fetched.search(page.read_text("utf-8"))]


def test_the_site_is_not_built_with_a_broken_link(tmp_path: Path) -> None:
    made = subprocess.run(
        ["make", "-n", "docs"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    (command,) = re.findall(r"\S+/mkdocs (build .*?)(?: #.*)?$", made, re.M)
    (tmp_path / "mkdocs.yml").write_text("site_name: one page\n")
    page = tmp_path / "docs" / "index.md"
    page.parent.mkdir()
    codes = []
    for link in ("index.md", "../README.md#install"):
        page.write_text(f"[a link]({link})\n")
        built = subprocess.run([sys.executable, "-m", "mkdocs", *command.split()], cwd=tmp_path)
        codes.append(built.returncode)
    assert codes == [0, 1]


def test_page_of_keys_has_an_anchor_for_each_section() -> None:
    text = (ROOT / "docs/configuration.md").read_text("utf-8")
    sections = re.findall(r"^#{2,3} `?([a-z_.]+)`?$", text, re.M)
    assert set(TrainerConfig.model_fields) <= set(sections), sections
    between = re.split(r"^#{2,3} ", text, flags=re.M)
    assert max(map(len, between)) < len(text) / 3


def test_ideas_draw_a_token_tree() -> None:
    drawn = (ROOT / "docs/ideas.md").read_text("utf-8")
    assert "images/idea-token-tree.svg" in drawn
    assert (ROOT / "docs/images/idea-token-tree.svg").is_file()


def test_tests_that_the_notes_name_exist() -> None:
    named = {
        found
        for page in (ROOT / "docs/notes").glob("*.md")
        for found in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text("utf-8"))
    }
    assert len(named) > 60
    texts = {file: (ROOT / file).read_text("utf-8") for file, _ in named}
    assert [each for each in named if f"def {each[1]}(" not in texts[each[0]]] == []


def test_files_that_the_pages_name_exist() -> None:
    names = {
        (page.name, name)
        for page in PAGES
        for name in FILE_NAME.findall(page.read_text())
        if "my_" not in name
    }
    missing = {(page, name) for page, name in names if not (ROOT / name).exists()}
    assert not missing


@pytest.mark.parametrize(
    "package", ["proxy", "agent_loop", "agent_loop.extras.swarm", "trainer", "harbor_sdk"]
)
def test_each_package_has_an_api_page_in_the_navigation(package: str) -> None:
    pages = re.findall(r"api/\w+\.md", (ROOT / "mkdocs.yml").read_text())
    texts = [(ROOT / "docs" / page).read_text() for page in pages]
    assert sum(f"::: {package}\n" in text for text in texts) == 1
