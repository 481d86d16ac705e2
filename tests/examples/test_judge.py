"""The judge of the examples, as the model that the repository contains."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.judge.expert import Judged, judgement, transcript
from tests.examples.test_starter_model import EXAMPLES

ORDER = {"hats": 5, "pens": 3}


@pytest.mark.parametrize(
    ("trial", "said"),
    [
        (Judged(ORDER, ("hats", "pens"), "5*4+3*6", "total: 38"), "Reward: 1"),
        (Judged(ORDER, ("hats",), "5*4", "total: 20"), "pens 3: forgotten, not times"),
        (Judged(ORDER, ("hats", "pens"), "5+4+3+6", "total: 18"), "hats 5: looked up, not times"),
        (Judged(ORDER, ("hats", "pens"), "5*4+3*6", "pens: 6"), "answer: no total\nReward: 0"),
    ],
)
def test_judgement_names_the_mistake(trial: Judged, said: str) -> None:
    assert said in judgement(trial)
    assert judgement(trial).endswith("Reward: 1") == (said == "Reward: 1")


def test_model_judges_trials_that_it_was_not_trained_on() -> None:
    folder = EXAMPLES / "judge/model"
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = "<|endoftext|>"
    model = AutoModelForCausalLM.from_pretrained(folder)
    rng = random.Random(4321)
    trials = [transcript(rng).messages for _ in range(64)]
    texts = [
        tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
        for messages in trials
    ]
    given = tokenizer(texts, return_tensors="pt", padding=True)
    with torch.no_grad():
        said = model.generate(**given, max_new_tokens=64, do_sample=False)
    replies = tokenizer.batch_decode(said[:, given.input_ids.shape[1] :], skip_special_tokens=True)
    rewards = [reply.rpartition("Reward: ")[2] for reply in replies]
    wanted = [messages[1]["content"].rpartition("Reward: ")[2] for messages in trials]
    right = sum(a == b for a, b in zip(rewards, wanted, strict=True))
    assert set(rewards) == {"0", "1"}
    assert right >= 54  # 236 of 256 were right
