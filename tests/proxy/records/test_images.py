"""Image tokens in arrays of ids: equal only for equal images, and never sent as they are."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from proxy.errors import ImageError
from proxy.records import Ids, ImageSpan
from proxy.records.images import check_images, decoded, engine_ids, image_ids, moved, uncut, within

TOKEN = 151655


def image(name: str, tokens: int, offset: int = 0) -> ImageSpan:
    digest = hashlib.sha256(name.encode()).hexdigest()
    return ImageSpan(offset, tokens, TOKEN, digest, digest, (1, 2, 2 * tokens))


def prompt(*parts: list[int] | ImageSpan) -> tuple[Ids, tuple[ImageSpan, ...]]:
    """The ids of texts and images that follow each other, and the images at their places."""
    ids: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, ImageSpan):
            images.append(replace(part, offset=len(ids)))
            ids += image_ids(part.digest, part.tokens).tolist()
        else:
            ids += part
    return np.array(ids, np.int32), tuple(images)


def test_engine_gets_the_models_own_token_for_each_part_of_an_image() -> None:
    ids, images = prompt([1, 2], image("a", 3), [4], image("b", 1))
    assert engine_ids(ids, images).tolist() == [1, 2, TOKEN, TOKEN, TOKEN, 4, TOKEN]
    assert (ids < 0).sum() == 4


def test_text_costs_nothing() -> None:
    ids = np.array([1, 2, 3], np.int32)
    assert engine_ids(ids, ()) is ids


def test_images_of_one_size_differ_in_every_token_and_equal_images_in_none() -> None:
    one, same, other = (image_ids(image(name, 1000).digest, 1000) for name in ("a", "a", "b"))
    assert (one == same).all()
    assert not (one == other).any()
    assert len(set(one.tolist())) == 1000
    assert one.max() < 0


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda images: (), id="none"),
        pytest.param(lambda images: images[:1], id="the second is lost"),
        pytest.param(lambda images: images[::-1], id="in another order"),
        pytest.param(lambda images: (*images, images[1]), id="twice"),
        pytest.param(lambda images: (replace(images[0], offset=1), images[1]), id="moved"),
        pytest.param(lambda images: (replace(images[0], tokens=2), images[1]), id="shorter"),
        pytest.param(lambda images: (replace(images[0], tokens=4), images[1]), id="longer"),
        pytest.param(
            lambda images: (replace(images[0], digest=images[1].digest), images[1]), id="swapped"
        ),
    ],
)
def test_images_that_are_not_those_of_the_ids_are_an_error(wrong: object) -> None:
    ids, images = prompt([1, 2], image("a", 3), [4], image("b", 3))
    check_images(ids, images)
    with pytest.raises(ImageError):
        engine_ids(ids, wrong(images))  # type: ignore[operator]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.data())
def test_parts_of_a_prompt_have_the_images_that_lie_in_them(
    lengths: list[int], data: st.DataObject
) -> None:
    parts = [image(f"{n}", n) if n else [7, 8] for n in lengths]
    ids, images = prompt(*parts)
    cut = uncut(images, data.draw(st.integers(0, len(ids))))
    first, rest = within(images, 0, cut), within(images, cut, len(ids))
    check_images(ids[:cut], first)
    check_images(ids[cut:], rest)
    assert (*first, *moved(rest, cut)) == images


def test_cut_within_an_image_is_an_error() -> None:
    _, images = prompt([1, 2], image("a", 3))
    assert uncut(images, 4) == 2
    with pytest.raises(ImageError, match="cut it at"):
        within(images, 0, 4)


def test_images_are_words_in_decoded_ids() -> None:
    ids, _ = prompt([7, 8], image("a", 4), [9])
    name = f"{-1 - int(ids[2]):08x}"
    assert decoded(ids, lambda own: f"<{own}>") == f"<[7, 8]>[image {name}, 4 tokens]<[9]>"
    assert decoded(ids[:0], str) == ""
    other, _ = prompt([7, 8], image("b", 4), [9])
    assert decoded(ids, str) != decoded(other, str)
