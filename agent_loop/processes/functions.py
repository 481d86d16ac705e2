"""Calls the user's Python functions, each call in a process of its own.

Invariant: the function's module is never imported in this process. It is imported once, in a server
process (`function_server.py`) from which each call is forked.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent_loop.errors import RewardError
from agent_loop.processes.environment import inherited_environment
from agent_loop.processes.host import Ended, ProcessHost
from agent_loop.records import NO_REWARD, Graded
from agent_loop.reward_values import graded
from proxy.errors import ConfigurationError

RETURNED_BYTES = 1 << 20
"""Maximum size of a returned value as JSON; a reward has a few bytes."""


def function_host(argument: type, target: str, pass_env: Sequence[str] = ()) -> ProcessHost:
    """A host whose processes call the function `target` (`module:function`) with an object of the
    class `argument`, whose fields are the job's `call["argument"]`.

    Raises:
        ConfigurationError: the function's module or file does not exist, or defines no function
            with that name and one parameter.
    """
    _check_exists(target)
    _check_signature(target, f"call: {argument.__module__}.{argument.__qualname__}")
    server = (sys.executable, "-m", "agent_loop.processes.function_server")
    argument_name = f"{argument.__module__}:{argument.__qualname__}"
    return ProcessHost(server, (argument_name, target), inherited_environment(pass_env))


def source_file(target: str) -> Path | None:
    """The file of the function's module; None if there is no such file."""
    module = target.rpartition(":")[0]
    if module.endswith(".py"):
        file = Path(module).absolute()
        return file if file.is_file() else None
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None
    return None if found is None or found.origin is None else Path(found.origin)


def _check_exists(target: str) -> None:
    if source_file(target) is not None:
        return
    module = target.rpartition(":")[0]
    if module.endswith(".py"):
        raise ConfigurationError(
            f"{target!r}: there is no file {str(Path(module).absolute())!r}; give its path from "
            "the folder in which this program is started"
        )
    raise ConfigurationError(
        f"{target!r}: there is no module {module!r} on Python's path; install it, start from the "
        "folder that contains it, or give its file: path/to/file.py:function"
    )


def _check_signature(target: str, parameter: str) -> None:
    """Reads the function's definition without importing it. A function that the module only
    imports is not checked."""
    file, name = source_file(target), target.rpartition(":")[2]
    if file is None or file.suffix != ".py":
        return
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError as error:
        raise ConfigurationError(f"{target}: {file} is not Python: {error}") from None
    right = f"def {name}({parameter}) -> float | dict[str, float] | None"
    defined = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
    ]
    if not defined:
        if name not in _bound_names(tree):
            raise ConfigurationError(f"{target}: {file} defines no {name}; write {right}")
        return
    found = defined[-1].args
    positional = [*found.posonlyargs, *found.args]
    required = len(positional) - len(found.defaults)
    keywords = [default for default in found.kw_defaults if default is None]
    if required > 1 or keywords or not (positional or found.vararg):
        raise ConfigurationError(
            f"{target} has the signature {name}({ast.unparse(found)}), and is called with one "
            f"argument; write it as {right}"
        )


def _bound_names(tree: ast.Module) -> set[str]:
    """Names that a module binds in any other way than a definition at its top level, which may
    be its functions."""
    bound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.alias):
            bound.add(node.asname or node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
    return bound


def returned(ended: Ended, result: Path, target: str, key: str) -> Graded:
    """The reward that the function returned; no reward if it did not return.

    Raises:
        RewardError: the returned value is not a reward.
    """
    if ended.failure is not None or not result.exists():
        return NO_REWARD
    with result.open("rb") as file:
        text = file.read(RETURNED_BYTES + 1)
    if not text:
        return NO_REWARD
    if len(text) > RETURNED_BYTES:
        raise RewardError(f"{target}: returned more than {RETURNED_BYTES} bytes")
    try:
        value: Any = json.loads(text)
    except ValueError as error:  # an agent can write into its file
        raise RewardError(f"{target}: {result.name} is not JSON ({error})") from None
    return graded(value, key, f"{target}'s return value")
