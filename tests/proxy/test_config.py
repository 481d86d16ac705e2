import ast
import inspect
import textwrap
from itertools import pairwise
from pathlib import Path

import pytest

from proxy import config
from proxy.config import load_config
from proxy.errors import ConfigurationError


def test_command_line_beats_environment_beats_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "proxy.yaml"
    file.write_text("port: 1\nserved_model_name: yaml\nlimits: {keep_alive_s: 3, body_bytes: 2048}")
    monkeypatch.setenv("AGENTIC_PROXY_PORT", "2")
    monkeypatch.setenv("AGENTIC_PROXY_LIMITS__BODY_BYTES", "4096")

    loaded = load_config(file, port=3)

    assert loaded.port == 3
    assert loaded.served_model_name == "yaml"
    assert loaded.limits.body_bytes == 4096
    assert loaded.limits.keep_alive_s == 3
    assert load_config(file).port == 2


@pytest.mark.parametrize(
    ("yaml", "says"),
    [
        ("prot: 1", "prot"),
        ("limits: {body_byte: 1}", "limits.body_byte"),
        ("port: 70000", "port"),
        ("- 1", "must be a mapping of keys"),
        ("port: [", "not YAML"),
        ("host: 0.0.0.0", "AGENTIC_PROXY_ADMIN_KEY"),
        ("{host: 0.0.0.0, admin_key: k, sessions: {auto_create: true}}", "auto_create"),
        ("{listen_fd: 3, workers: 2}", "listen_fd=3 is one process"),
    ],
)
def test_invalid_configuration_is_reported_in_one_line_with_the_key(
    tmp_path: Path, yaml: str, says: str
) -> None:
    file = tmp_path / "proxy.yaml"
    file.write_text(yaml)

    with pytest.raises(ConfigurationError, match=says):
        load_config(file)


def test_host_outside_loopback_needs_an_admin_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTIC_PROXY_ADMIN_KEY", "k")
    assert load_config(host="0.0.0.0").host == "0.0.0.0"


def test_all_invalid_keys_are_reported_together_without_secrets(tmp_path: Path) -> None:
    file = tmp_path / "proxy.yaml"
    file.write_text("prot: 1\nlimits: {body_byte: 1}\nadmin_key: [hunter2]\n")
    with pytest.raises(ConfigurationError) as refused:
        load_config(file)
    for key in ("prot", "limits.body_byte", "admin_key"):
        assert f"{key}: " in refused.value.message
    assert "hunter2" not in refused.value.message


def described(section: ast.ClassDef) -> dict[str, bool]:
    """Whether each key has a text of its own."""
    return {
        ast.unparse(node.target): isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        for node, text in pairwise([*section.body, None])
        if isinstance(node, ast.AnnAssign)
    }


def test_every_key_is_documented() -> None:
    """By its own text, or by that of the section that it is taken from with another default."""
    tree = ast.parse(Path(config.__file__).read_text())
    for section in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        assert ast.get_docstring(section), section.name
        taken: dict[str, bool] = {}
        for base in getattr(config, section.name).__bases__:
            if "__annotations__" in vars(base) and base.__module__.startswith("proxy."):
                (source,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
                assert isinstance(source, ast.ClassDef)
                taken |= described(source)
        for key, has_text in described(section).items():
            assert has_text or taken.get(key), f"{section.name}.{key} has no text"
