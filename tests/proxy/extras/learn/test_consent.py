"""Which sessions may be learned from."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.extras.learn.consent import consent_of_folder, has_consented, notes_of_folder


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("learn: true\n", "yes"),
        ("learn: false\n", "no"),
        ("learn: maybe\n", ""),
        ("other: 1\n", ""),
        ("", ""),
        ("learn: [", "no"),
        ("\0", "no"),
    ],
)
def test_the_nearest_file_decides(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / ".agentic-proxy").write_text("learn: true\n")
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    assert consent_of_folder(inner) == "yes"
    (tmp_path / "a" / ".agentic-proxy").write_text(text)
    assert consent_of_folder(inner) == said
    assert notes_of_folder(inner) == ({"learn": said} if said else {})


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, False),
        ({"folder": "/code/shop/sub"}, True),
        ({"folder": "/code/shop"}, True),
        ({"folder": "/code/shopping"}, False),
        ({"folder": "/code/shop/../secret"}, False),
        ({"folder": 3}, False),
        ({"learn": "yes"}, True),
        ({"learn": "no", "folder": "/code/shop"}, False),
        ({"learn": "whatever", "folder": "/code/shop"}, False),
    ],
)
def test_a_session_needs_a_yes(metadata: dict[str, object], expected: bool) -> None:
    assert has_consented(metadata, [Path("/code/shop")], {}) is expected


def test_a_learner_of_one_person_has_no_session_of_another() -> None:
    assert has_consented({"learn": "yes", "person": "ann"}, [], {"person": "ann"})
    assert not has_consented({"learn": "yes", "person": "bob"}, [], {"person": "ann"})
    assert not has_consented({"learn": "yes"}, [], {"person": "ann"})
