"""What trains, shows or compares sessions and has no place for images: it says so by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from agent_loop.errors import AgentLoopError
from agent_loop.extras.other_trainers.trial_batch import completion
from agent_loop.records import Rollout, RolloutStatus, Task
from agent_loop.trajectory import build_segments
from proxy.config import RenderingConfig
from proxy.conversation.images import mark
from proxy.conversation.messages import Conversation, Message, dump_answer
from proxy.conversation.recorded import dump_request
from proxy.extras.export.protocol import Sample
from proxy.records import Turn
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import load_tokenizer
from proxy.token_tree.rendered import NotRenderable
from tests.agent_loop.recorded import turn as a_turn
from tests.proxy.checkpoint import write_checkpoint
from tests.proxy.extras.export.trees import a_session
from tests.proxy.records.test_images import image, prompt
from trainer.extras.learn.judging import Judged
from trainer.extras.learn.rollouts import Lineage, prepared
from trainer.extras.learn.seen import Seen
from trainer.extras.ledger.prompts import form
from trainer.extras.sft.demonstrations import demonstration


@pytest.fixture
def turn() -> Turn:
    """A turn whose prompt has an image."""
    ids, images = prompt([7, 8], image("a", 4), [9])
    text = f"Look at {mark(images[0].sha256)}. Thanks"
    request = dump_request(Conversation([Message("user", text)]), -1, None)
    made = a_turn(0, None, 0, ids.tolist(), [11, 12])
    answer = dump_answer(Message("assistant", "It is red."))
    return replace(made, prompt_ids=ids, images=images, request=request, answer=answer)


def test_completions_of_other_trainers_refuse_images(turn: Turn) -> None:
    segments = build_segments([turn])
    rollout = Rollout("t-1", Task("t", {}), RolloutStatus.DONE, 1.0, segments=segments)
    with pytest.raises(AgentLoopError, match="trial t-1 has images"):
        completion(rollout)


def test_learner_of_a_text_model_leaves_images_out_by_name(turn: Turn) -> None:
    lineage = Lineage("work", {0: 0}, max_staleness=1, temperature=1.0)
    found = prepared(a_session(), [turn], Judged("t", 1.0, {0: 1.0}), lineage)
    assert found.group is None
    assert dict(found.left_out) == {"images, which model.vision=text does not train": 1}


def test_evidence_reads_words_for_images(turn: Turn) -> None:
    (said,) = Seen(a_session(), [turn], now=1.0).said
    assert said.text == f"Look at [image {turn.images[0].sha256[:12]}]. Thanks"


def test_sft_leaves_images_out_by_name(turn: Turn, tmp_path: Path) -> None:
    rendering = Rendering(load_tokenizer(write_checkpoint(tmp_path)), RenderingConfig())
    with pytest.raises(NotRenderable, match=r"images, which model\.vision=text does not train"):
        demonstration(Sample(a_session(), [turn]), rendering)


def test_prompts_that_differ_in_an_image_differ_in_an_image() -> None:
    assert form("[image 0f3a91c2, 768 tokens]", "[image 1f3a91c2, 768 tokens]") == "image"
