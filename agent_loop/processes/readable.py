"""What a program has to read, found from its command line and its environment.

A program behind a wall reads the system, and of everything else only what is found here: the
installations of its interpreter and of the tools on its PATH, the files and folders that its
command line and its settings name, and what its Python scripts import. Invariant: nothing that
contains the folder in which this process was started, its repository, or the home folder is found;
their parts are, if the command line or an installation is one of them.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from agent_loop.processes.environment import CERTIFICATES
from proxy.errors import ConfigurationError
from proxy.wall import SYSTEM

_OWN_PACKAGES = Path(__file__).resolve().parents[2]
"""The folder of our packages: the repository, or `site-packages`."""
_OWN_NAMES = ("agent_loop", "proxy", "harbor_sdk")
_NAMED_BY = (
    *("JAVA_HOME", "GOROOT", "CONDA_PREFIX", "VIRTUAL_ENV", "NVM_DIR", "RUSTUP_HOME", "CUDA_HOME"),
    *("PLAYWRIGHT_BROWSERS_PATH", "NODE_PATH", "LD_LIBRARY_PATH", "TIKTOKEN_CACHE_DIR"),
    *("PYTHONPATH", *sorted(CERTIFICATES)),
)
"""Variables whose values are folders or files of tools; `HF_HOME` is none, because it may hold a
token."""
_COMPANIONS = {".cargo/bin": "../../.rustup"}
"""Folders of programs → what these programs need beside them."""
_SHIMS = ("versions", "installs")
"""Beside a folder `shims` (of pyenv, asdf, mise): where the programs are that it starts."""
_JAVASCRIPT = (".js", ".mjs", ".cjs", ".jsx", ".ts", ".mts", ".cts", ".tsx")
_SPECIFIER = re.compile(r"""\b(?:from|import|require|resolve)\s*\(?\s*["'](\.{1,2}/[^"'\n]*)["']""")
"""The relative path of a module in an import, a re-export, or a call of `import` or `require`."""
_SHEBANG_BYTES = 512
_ASSIGNED = re.compile(r"""^-{0,2}[\w.-]+=(?P<quote>["']?)(?P<path>/.*)(?P=quote)$""", re.DOTALL)
"""An option with its value in one word: `--config=/path`, or `file="/path"`, as Codex's TOML."""


def repository(folder: Path) -> Path:
    """The outermost folder with a `.git` that contains the folder; itself if there is none."""
    found = [each for each in (folder, *folder.parents) if (each / ".git").exists()]
    return found[-1] if found else folder


def readable(
    argv: Sequence[str], env: Mapping[str, str], named: Mapping[str, str], own: Path
) -> list[Path]:
    """The files and folders that the program reads, as absolute paths.

    Args:
        argv: the program and its arguments, without placeholders.
        env: its environment.
        named: the variables of `env` that the user's configuration sets; the paths in their values
            are found, too.
        own: a folder whose files are not among what is found, nor what they import: an agent may
            have written them.
    """
    path = env.get("PATH", os.defpath)
    found: dict[Path, None] = {}
    for folder in _folders(path):
        found.update(dict.fromkeys(_tools(folder)))
    for word in (*argv, *named.values()):
        for each in _named(word, path, own.absolute()):
            found[each] = None
    for name in _NAMED_BY:
        for part in env.get(name, "").split(os.pathsep):
            if os.path.isabs(part) and not (name == "PYTHONPATH" and _is_ours(Path(part))):
                found[Path(part)] = None
    own = own.absolute()
    outside = (each for each in found if not each.is_relative_to(own) and each.exists())
    return _outer(each for each in outside if not _contains_protected(each))


def declared(key: str, paths: Iterable[Path]) -> tuple[Path, ...]:
    """The absolute paths that a setting shows. Relative ones are in the folder in which this
    process was started, which is also `{root}`.

    Raises:
        ConfigurationError: there is none of this name, so that a program would not find it either.
    """
    found = tuple(Path(str(path).replace("{root}", os.getcwd())).absolute() for path in paths)
    missing = next((path for path in found if not path.exists()), None)
    if missing is not None:
        raise ConfigurationError(f"{key}: there is no {missing}; name a file or a folder")
    return found


def own_python() -> list[Path]:
    """The Python of this process and our packages: in a function's process, modules of both may be
    imported late."""
    packages = [_OWN_PACKAGES / name for name in _OWN_NAMES]
    return [Path(sys.prefix), Path(sys.base_prefix), *packages]


def imported(script: Path) -> list[Path]:
    """The script, and the files that it imports, with those that these import: a Python script's
    from its own folder and from the folder in which this process was started, a JavaScript or
    TypeScript one's by relative paths. Nothing is executed. Any other file is found alone."""
    found: dict[Path, None] = {}
    pending = [script]
    while pending:
        file = pending.pop()
        if file in found:
            continue
        found[file] = None
        if _is_installed(file):
            continue
        if file.suffix == ".py":
            pending += [each for name in _imports(file) for each in _module(name, file.parent)]
        elif file.suffix in _JAVASCRIPT:
            pending += _relative_imports(file)
    return list(dict.fromkeys(_package_of_ours(file) or file for file in found))


def installation(program: Path, path: str = os.defpath) -> list[Path]:
    """What belongs to a program: its folder of installation, and those of the links that lead to it
    and of its interpreter. Alone in a folder, it is a file of its own."""
    found: list[Path] = []
    step = Path(os.path.abspath(program))
    for _ in range(40):  # as many links as the kernel follows
        found += _prefix(step)
        if not step.is_symlink():
            break
        step = Path(os.path.normpath(step.parent / step.readlink()))
    if step.is_file():
        found += _interpreter(step, path)
    return found


def _named(word: str, path: str, own: Path) -> Iterator[Path]:
    """What a word of a command line names."""
    text = _ASSIGNED.sub(r"\g<path>", word)
    if os.path.isabs(text) and os.path.exists(text):
        file = Path(os.path.normpath(text))
        yield file
        if file.is_file() and not file.is_relative_to(own):
            yield from imported(file)
            if os.access(file, os.X_OK):
                yield from installation(file, path)
    elif text and "/" not in text and (program := shutil.which(text, path=path)) is not None:
        yield from installation(Path(program), path)


@lru_cache(maxsize=256)
def _tools(folder: Path) -> tuple[Path, ...]:
    """What the programs in a folder of PATH need."""
    found = [folder, *_prefix(folder / "any")]
    for name, beside in _COMPANIONS.items():
        if str(folder).endswith(f"/{name}"):
            found.append(Path(os.path.normpath(folder / beside)))
    try:
        links = [Path(each.path) for each in os.scandir(folder) if each.is_symlink()]
    except OSError:
        return ()
    for link in links:
        if not link.resolve().is_relative_to(folder):
            found += installation(link)
    return tuple(dict.fromkeys(found))


def _prefix(program: Path) -> list[Path]:
    """The folder of installation of a program at this path."""
    parts = program.parts
    if "node_modules" in parts:
        return [Path(*parts[: parts.index("node_modules") + 1])]
    if "site-packages" in parts:
        return [Path(*parts[: parts.index("site-packages") + 1])]
    folder = program.parent
    above = folder.parent
    if folder.name == "shims" and any((above / name).is_dir() for name in _SHIMS):
        return [above]
    if folder.name in ("bin", "Scripts") and not _contains_protected(above):
        if (above / "pyvenv.cfg").is_file():
            return [above, *_home_of(above / "pyvenv.cfg")]
        if any((above / name).is_dir() for name in ("lib", "conda-meta")) and above.name not in (
            ".local",
            "local",
        ):
            return [above]
    return [program] if program.is_file() or program.is_symlink() else []


def _home_of(configuration: Path) -> list[Path]:
    """The installation of the Python that a virtual environment was made with."""
    for line in configuration.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition("=")
        if name.strip() == "home":
            home = Path(value.strip())
            return _prefix(Path(os.path.realpath(home)) / "python")
    return []


def _interpreter(file: Path, path: str) -> list[Path]:
    """The installation of the program that a script's first line names."""
    try:
        with file.open("rb") as opened:
            line = opened.read(_SHEBANG_BYTES).split(b"\n")[0]
    except OSError:
        return []
    if not line.startswith(b"#!"):
        return []
    words = line[2:].decode(errors="replace").split()
    if words and os.path.basename(words[0]) == "env":
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
        words = [shutil.which(words[0], path=path) or ""] if words else []
    if not words or not os.path.isabs(words[0]) or Path(words[0]) == file:
        return []
    return installation(Path(words[0]), path)


def _outer(paths: Iterable[Path]) -> list[Path]:
    """Those that are not the system's, and not inside of another one of them."""
    kept: list[Path] = []
    for path in sorted(set(paths), key=lambda each: len(str(each))):
        inside = any(path.is_relative_to(each) for each in kept)
        if not inside and (_is_ours(path) or not _is_system(path)):
            kept.append(path)
    return kept


def _is_system(path: Path) -> bool:
    real = os.path.realpath(path)
    return any(real == each or real.startswith(each + "/") for each in SYSTEM)


def _folders(path: str) -> Iterator[Path]:
    for part in path.split(os.pathsep):
        folder = Path(os.path.normpath(part))
        if (
            folder.is_absolute()
            and folder.is_dir()
            and (_is_ours(folder) or not _is_system(folder))
        ):
            yield folder


def _imports(file: Path) -> Iterator[str]:
    """The dotted names of the modules that a file imports; those of its own package with as many
    dots as it writes."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            name = "." * node.level + (node.module or "")
            yield name
            join = "" if name.endswith(".") else "."
            yield from (f"{name}{join}{alias.name}" for alias in node.names)


def _module(name: str, folder: Path) -> Iterator[Path]:
    """The files of a module and of the packages that contain it, in the script's own folder or
    below the folder in which this process was started."""
    dots = len(name) - len(name.lstrip("."))
    roots = (folder, Path.cwd())
    if dots:
        roots = (folder.joinpath(*[".."] * (dots - 1)).resolve(),) * 2
    parts = name.lstrip(".").split(".")
    for root in dict.fromkeys(roots):
        for count in range(1, len(parts) + 1):
            place = root.joinpath(*parts[:count])
            for file in (place.with_name(place.name + ".py"), place / "__init__.py"):
                if parts[count - 1] and file.is_file():
                    yield file


def _relative_imports(file: Path) -> Iterator[Path]:
    """The modules that a JavaScript file names by relative paths, with or without their extension,
    and the `package.json` that says of which kind they are."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for found in _SPECIFIER.finditer(text):
        named = Path(os.path.normpath(file.parent / found[1]))
        places = [named, *(named.with_name(named.name + each) for each in (*_JAVASCRIPT, ".json"))]
        if named.suffix in _JAVASCRIPT:  # TypeScript imports the file that it will become
            places += [named.with_suffix(each) for each in _JAVASCRIPT]
        places += [named / f"index{each}" for each in _JAVASCRIPT]
        yield from (place for place in places if place.is_file())
    packages = (folder / "package.json" for folder in file.parents)
    nearest = next((each for each in packages if each.is_file()), None)
    if nearest is not None:
        yield nearest


def _package_of_ours(file: Path) -> Path | None:
    """The folder of the package of ours that the file is in. It is shown whole: its files import
    one another, and each would be a mount."""
    if not file.resolve().is_relative_to(_OWN_PACKAGES):
        return None
    name = file.resolve().relative_to(_OWN_PACKAGES).parts[0]
    return _OWN_PACKAGES / name if name in _OWN_NAMES else None


def _is_installed(file: Path) -> bool:
    folders = {"site-packages", "node_modules"}
    return not folders.isdisjoint(file.parts) or _package_of_ours(file) is not None


def _is_ours(path: Path) -> bool:
    """Whether it is in the repository in which this process was started."""
    return path.resolve().is_relative_to(repository(Path.cwd()).resolve())


def _contains_protected(path: Path) -> bool:
    real = path.resolve()
    start = Path.cwd().resolve()
    protected = (start, repository(start), Path.home().resolve())
    return any(each.is_relative_to(real) for each in protected)
