"""What is found in one text, what is left alone, and how long it takes."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from proxy.conversation.images import mark
from proxy.extras.secrets import Known, find, found, mask, untrained
from proxy.extras.secrets.kinds import KINDS
from proxy.extras.secrets.page import page
from tests.proxy.extras.secrets.planted import MAKERS, planted


def test_page_of_the_kinds_is_current() -> None:
    written = (Path(__file__).parents[4] / "docs/secrets.md").read_text("utf-8")
    assert written == page(), "run: python -m proxy.extras.secrets.page > docs/secrets.md"


@pytest.mark.parametrize("kind", list(MAKERS))
@pytest.mark.parametrize("with_library", [True, False])
def test_every_kind_is_masked(
    kind: str, with_library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also within JSON within JSON, which stays JSON; and a masked text stays as it is."""
    if not with_library:
        monkeypatch.setattr(found, "library_spans", lambda _: ())
    at = list(MAKERS).index(kind)
    for seed in range(5):
        each = planted(seed, len(MAKERS))[at]
        masked = mask(each.text)
        nested = mask(json.dumps({"a": each.text, "b": [json.dumps({"c": each.text})]}))
        told = json.loads(nested)
        texts = [masked, told["a"], json.loads(told["b"][0])["c"]]
        for part in each.parts:
            assert all(part not in text for text in texts), (each.text, texts)
        assert mask(masked) == masked


@pytest.mark.parametrize(
    "text",
    [
        "def login(password: str, token: Token | None = None) -> bool:",
        "login(password=password, api_key=config.api_key, token=os.environ['TOKEN'])",
        "max_tokens: 4096, token_count: 17, tokens=[1, 2, 3]",
        '{"tokenizer": "Qwen/Qwen3-0.6B", "token_type": "Bearer"}',
        "DB_PASSWORD=${DB_PASSWORD} API_KEY=$KEY SECRET=<your secret here>",
        "git clone git@github.com:acme/site.git && @pytest.mark.slow",
        "https://docs.python.org:443/3/library/secrets.html?token=none#top",
        "a commit 3f2504e04f8911d39a0c0305e82c3301d4f0a7b1",
        "Co-Authored-By: Claude <noreply@anthropic.com>, or no-reply@github.com",
        "curl -d mail=you@example.com and somebody@mail.example.org",
        "password_file: /run/secrets/postgres-password",
        "The password is required, and the secret of success is a key to all.",
    ],
)
def test_what_is_no_secret_is_left_alone(text: str) -> None:
    assert mask(text) == text


def test_places_are_disjoint_and_in_order() -> None:
    random = Random(3)
    texts = [each.text for each in planted(3, 50)]
    random.shuffle(texts)
    places = find("\n".join(texts))
    assert len(places) >= 50
    assert all(one.end <= other.start for one, other in pairwise(places))


@pytest.mark.parametrize(
    "text",
    [
        "a" * 300_000,
        "password" * 40_000,
        "-----BEGIN PRIVATE KEY-----\n" * 3_000,
        "://" * 100_000,
        "eyJ" + "a." * 100_000,
        "token=" * 50_000,
        "@" * 200_000,
        "1" * 300_000,
        '{"a":' * 20_000,
        "Authorization: " * 20_000,
        "\\" * 200_000 + '"',
    ],
)
def test_no_text_takes_more_than_linear_time(text: str) -> None:
    """The limit is 100 times what such a text takes on a slow machine."""
    began = time.process_time()
    find(text)
    assert time.process_time() - began < 10


def test_names_of_kinds_are_documented_once() -> None:
    said = [kind.name for kind in KINDS if kind.says]
    assert sorted(said) == sorted({kind.name for kind in KINDS})


def test_images_are_neither_secrets_nor_parts_of_one() -> None:
    image = mark("a1" * 32)
    text = f"API_KEY={image} password: {image} token = hunter2Xq9{image}"
    known = Known()
    known.add("a1" * 32, "key")
    known.learn(text)
    assert known.mask(text).count(image) == 3
    assert "hunter2Xq9" not in known.mask(text)


def test_ids_of_an_image_beside_a_secret_are_not_marked() -> None:
    secret = [ord(each) for each in "password=x7!kPq2Zu"]
    ids = [*secret, -5, -7, -9, *secret, -5, *secret]
    where = untrained(ids, lambda own: "".join(map(chr, own)))
    assert [at for at, each in enumerate(ids) if each < 0 and where[at]] == []
    assert where.sum() >= 3 * len("x7!kPq2Zu")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '{"who": {"ann@corp.com": "owner", "bob@corp.com": "reader"}, '
            '"id": 1234567890123456789012}',
            '{"who": {"[secret:email]": "owner", "[secret:email]": "reader"}, '
            '"id": 1234567890123456789012}',
        ),
        (
            '{"n": 1.10, "a": 1, "a": 2, "to": "a@b.de"}',
            '{"n": 1.10, "a": 1, "a": 2, "to": "[secret:email]"}',
        ),
        (
            '{"a@b.de": 1,\n "password": 48151623}',
            '{"[secret:email]":1,"password":"[secret:password]"}',
        ),
    ],
)
def test_json_is_else_as_it_was(text: str, expected: str) -> None:
    """The last one has a secret that is no string, for which a marker in its text would be none."""
    assert mask(text) == expected
    assert mask(expected) == expected


@pytest.mark.parametrize("depth", [10, 900, 100_000])
def test_json_of_any_depth_and_with_half_a_character_is_masked(depth: int) -> None:
    deep = "[" * depth + '"a@b.de"' + "]" * depth
    assert mask(deep) == deep.replace("a@b.de", "[secret:email]")
    half = '{"to": "a@b.de", "x": "\\ud800", "password": 48151623}'
    assert "a@b.de" not in mask(half)
    mask(half).encode()


def test_names_that_are_masked_alike_are_told_apart() -> None:
    members = {"ann@corp.com": "owner", "bob@corp.com": "reader"}
    known = Known()
    assert known.mask_value(members) == {"[secret:email]": "owner", "[secret:email]#2": "reader"}
