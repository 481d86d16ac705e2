from pathlib import Path

import pytest

from proxy.config import load_config
from proxy.errors import ConfigurationError


def test_command_line_beats_environment_beats_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "proxy.yaml"
    file.write_text("port: 1\nserved_model_name: yaml\nlimits: {keep_alive_s: 3, body_bytes: 2048}")
    monkeypatch.setenv("AGENTIC_PROXY_PORT", "2")
    monkeypatch.setenv("AGENTIC_PROXY_LIMITS__BODY_BYTES", "4096")

    config = load_config(file, port=3)

    assert config.port == 3
    assert config.served_model_name == "yaml"
    assert config.limits.body_bytes == 4096
    assert config.limits.keep_alive_s == 3
    assert load_config(file).port == 2


@pytest.mark.parametrize(
    ("yaml", "says"),
    [
        ("prot: 1", "prot"),
        ("limits: {body_byte: 1}", "limits.body_byte"),
        ("port: 70000", "port"),
        ("- 1", "mapping"),
        ("port: [", "not YAML"),
        ("host: 0.0.0.0", "AGENTIC_PROXY_ADMIN_KEY"),
        ("{host: 0.0.0.0, admin_key: k, sessions: {auto_create: true}}", "auto_create"),
    ],
)
def test_a_wrong_configuration_ends_in_one_line_that_names_the_key(
    tmp_path: Path, yaml: str, says: str
) -> None:
    file = tmp_path / "proxy.yaml"
    file.write_text(yaml)

    with pytest.raises(ConfigurationError, match=says):
        load_config(file)


def test_off_loopback_starts_with_an_admin_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTIC_PROXY_ADMIN_KEY", "k")
    assert load_config(host="0.0.0.0").host == "0.0.0.0"
