"""A file of settings is read in full, or the fault and its place are reported."""

import math
from pathlib import Path

import pytest
import yaml

from proxy.config import load_config
from proxy.errors import ConfigurationError
from proxy.settings.yaml_file import parse_yaml, read_yaml, yaml_fault


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"port: 1\nhost: x\nport: 2\n", "line 3, column 1: the key 'port' is given twice"),
        (b"limits:\n  body_bytes: 1\n  body_bytes: 2\n", "line 3, column 3: the key 'body_by"),
        (b"served_model_name: caf\xe9\n", "characters that YAML does not allow"),
    ],
)
def test_proxy_reports_a_key_given_twice_and_a_file_that_is_not_utf_8(
    tmp_path: Path, content: bytes, says: str
) -> None:
    file = tmp_path / "proxy.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigurationError, match=says):
        load_config(file)


def test_file_with_merged_mappings_and_a_byte_order_mark_is_read_as_by_safe_load(
    tmp_path: Path,
) -> None:
    text = (
        "\ufeffa: &a {x: 1, y: é}\nb: {<<: *a, x: 2}\nc: {<<: [*a, {z: 3}], y: 4}\nd: [*a, {}]\n"
        "deep: {e: &e {<<: *a, x: 5}}\nf: {<<: *e}\ng: {1: x, '1': y}\n"
    )
    file = tmp_path / "any.yaml"
    file.write_text(text, encoding="utf-8")
    assert read_yaml(file) == yaml.safe_load(text.encode())
    file.write_text("")
    assert read_yaml(file) is None


BOMB = "a0: &a0 [x, x]\n" + "\n".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)
)
RECURSIVE = "a: &a {b: *a}\n"
DEEP = "[" * 5000 + "]" * 5000


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (BOMB, "aliases stand for more than"),
        (RECURSIVE, "an alias contains itself"),
        ("a: &a [*a]\n", "an alias contains itself"),
        ("a: &a {<<: *a}\n", "an alias contains itself"),
        (DEEP, "nested too deeply"),
        ("a: " + DEEP, "nested too deeply"),
    ],
)
def test_aliases_without_end_and_deep_nesting_are_faults_of_the_file(
    tmp_path: Path, text: str, problem: str
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(yaml.YAMLError) as fault:
        read_yaml(path)
    assert problem in yaml_fault(fault.value)
    with pytest.raises(yaml.YAMLError):
        parse_yaml(text)


@pytest.mark.parametrize(
    "text", ["a: " + "9" * 5000, "a: 2026-99-99", "a: !!int x", "a: !!float x", "[!!int '']"]
)
def test_value_that_is_none_of_its_kind_is_a_fault_of_the_file(text: str) -> None:
    with pytest.raises(yaml.YAMLError) as fault:
        parse_yaml(text)
    assert "can be read" in yaml_fault(fault.value)


def test_numbers_are_those_of_people(tmp_path: Path) -> None:
    text = "a: 1:30\nb: 010\nc: 0x10\nd: -1_000\ne: 1:30.5\nf: .5\ng: -.inf\nh: 2.\ni: 0\n"
    assert parse_yaml(text) == {
        "a": "1:30", "b": "010", "c": 16, "d": -1000, "e": "1:30.5", "f": 0.5, "g": -math.inf,
        "h": 2.0, "i": 0,
    }  # fmt: skip


def test_alias_used_twice_is_no_fault(tmp_path: Path) -> None:
    assert parse_yaml("a: &a {b: 1}\nc: [*a, *a]\nd: {<<: *a, e: 2}\n") == {
        "a": {"b": 1}, "c": [{"b": 1}, {"b": 1}], "d": {"b": 1, "e": 2},
    }  # fmt: skip
