"""What stands for an image in a text, for people."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.branching.divergence import difference
from proxy.conversation.first_words import first_words
from proxy.conversation.images import MARK, mark, shown, told_apart, uncut
from proxy.conversation.messages import Conversation, Message
from proxy.conversation.recorded import dump_request

ONE, OTHER = mark("a" * 64), mark("b" * 64)
TEXTS = st.lists(st.sampled_from([ONE, OTHER, "a word", " ", "f" * 70]), max_size=6).map("".join)


def test_people_see_a_word_for_an_image() -> None:
    assert shown(f"Compare{ONE}with{OTHER}") == "Compare [image] with [image]"
    assert shown("  text alone ") == "  text alone "
    assert told_apart(ONE + OTHER) == f"[image {'a' * 12}][image {'b' * 12}]"


def test_title_of_an_image_alone_is_a_word() -> None:
    request = dump_request(Conversation([Message("user", ONE)]), -1, None)
    assert first_words([request]) == "[image]"


@given(TEXTS, st.integers(0, 400))
def test_a_piece_of_a_text_holds_whole_images(text: str, end: int) -> None:
    at = uncut(text, end)
    assert text[:at].count(MARK) % 2 == 0
    assert end - len(ONE) < at <= end
    assert at == end or at == 0 or text[:end].count(MARK) % 2 == 1 or text[at] == MARK


def test_difference_of_requests_names_their_images() -> None:
    found = difference(1, 0, f"[user]\nLook: {ONE}", f"[user]\nLook: {OTHER}")
    assert found.summary == (f"recorded 'Look: [image {'a' * 12}]', got 'Look: [image {'b' * 12}]'")
    assert MARK not in found.diff
