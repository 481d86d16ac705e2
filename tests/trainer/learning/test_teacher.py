"""Teachers of a distillation: a checkpoint or an engine with the policy's tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from agent_loop.records import Group, Task
from examples.starter_model.tokenizer import save_tokenizer, train_tokenizer
from proxy.engines.vllm_server import VllmServer
from tests.conftest import TINY_CONTEXT_TOKENS
from tests.trainer.rollouts import VOCABULARY, group, rollout
from tests.trainer.test_fit import config_of
from trainer.algorithms import Algorithm, AlgorithmConfig
from trainer.algorithms.kl import K2
from trainer.batch import Batch, build_batch
from trainer.errors import ConfigError, TrainingError
from trainer.learning.model_checks import check_engine_tokens, check_models, have_same_tokens
from trainer.learning.models import Models
from trainer.learning.teacher import EngineTeacher
from trainer.optimizer_config import OptimizerConfig
from trainer.policy.model_config import ModelConfig
from trainer.policy.parallel import Ranks
from trainer.policy.policy import Policy


@pytest.fixture
def batch() -> Batch:
    rng = np.random.default_rng(5)
    return build_batch([group(rng, f"task{i}", segments=4) for i in range(2)])


@pytest.fixture
def other_tokenizer(tiny_model: Path, tmp_path: Path) -> Path:
    """The tiny model with a tokenizer of the same size that was trained on another text."""
    folder = tmp_path / "other"
    shutil.copytree(tiny_model, folder)
    save_tokenizer(train_tokenizer(["The quick brown fox jumps."] * 9, 512), folder, 2048)
    return folder


def distillation(**settings: object) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"advantage": "none", "distillation": settings})


def test_engine_scores_the_tokens_as_the_same_checkpoint_does(
    vllm: VllmServer, tiny_model: Path, batch: Batch
) -> None:
    teacher = EngineTeacher(vllm.url, Ranks(), concurrency=3)
    scored = teacher.compute_logprobs(batch, temperature=1.0).logprobs
    loaded = Policy(ModelConfig(path=tiny_model)).compute_logprobs(batch, temperature=1.0).logprobs
    torch.testing.assert_close(scored, loaded, atol=1e-3, rtol=0)
    assert scored.std() > 0.1


def test_engine_scores_a_sequence_that_fills_its_context(
    vllm: VllmServer, tiny_model: Path
) -> None:
    answer = rollout(np.random.default_rng(5), "", prompt=()).segments[0].ids
    prompt = [at % VOCABULARY for at in range(TINY_CONTEXT_TOKENS - len(answer))]
    full = rollout(np.random.default_rng(5), "full", prompt=prompt)
    batch = build_batch([Group("g", Task("g", {}), [full])])
    assert len(batch.sequences[0]) == TINY_CONTEXT_TOKENS
    teacher = EngineTeacher(vllm.url, Ranks(), concurrency=1)
    scored = teacher.compute_logprobs(batch, temperature=1.0).logprobs
    loaded = Policy(ModelConfig(path=tiny_model)).compute_logprobs(batch, temperature=1.0).logprobs
    torch.testing.assert_close(scored, loaded, atol=1e-3, rtol=0)


def test_engine_distills_no_token_that_was_sampled_from_a_part_of_the_vocabulary(
    vllm: VllmServer, batch: Batch
) -> None:
    teacher = EngineTeacher(vllm.url, Ranks(), concurrency=1)
    whole = teacher.compute_logprobs(batch, temperature=1.0).logprobs
    restricted = torch.arange(batch.num_tokens) % 3 == 0
    batch.kept = torch.where(restricted[:, None], batch.ids[:, None], -1)
    scored = teacher.compute_logprobs(batch, temperature=1.0).logprobs
    assert scored[restricted].isnan().all()
    torch.testing.assert_close(scored[~restricted], whole[~restricted], atol=1e-3, rtol=0)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_token_that_the_teacher_cannot_score_has_no_loss_and_no_gradient(
    batch: Batch, estimator: str
) -> None:
    algorithm = Algorithm(distillation(teacher="http://teacher", estimator=estimator))
    batch.prox_logprobs = batch.logprobs.clone()
    batch.teacher_logprobs = batch.logprobs + 0.5
    unknown = torch.arange(batch.num_tokens) % 3 == 0
    batch.teacher_logprobs[unknown] = torch.nan
    algorithm.compute_advantages(batch)
    logprobs = batch.logprobs.clone().requires_grad_()
    loss = algorithm.loss(batch)(logprobs, torch.zeros_like(logprobs), torch.arange(len(logprobs)))
    (gradient,) = torch.autograd.grad(loss.losses.sum(), logprobs)
    assert (gradient[unknown] == 0).all()
    assert (gradient[~unknown] != 0).all()
    share = float(loss.metrics["distillation_left_out"])
    assert 0.2 < share < 0.5


def test_teachers_with_the_policys_tokenizer_are_accepted(
    vllm: VllmServer, tiny_model: Path
) -> None:
    check_models(ModelConfig(path=tiny_model), distillation(teacher=vllm.url))
    check_models(ModelConfig(path=tiny_model), distillation(teacher=str(tiny_model)))


def test_engine_with_another_tokenizer_is_refused(vllm: VllmServer, other_tokenizer: Path) -> None:
    with pytest.raises(ConfigError, match="has another tokenizer than the policy"):
        check_engine_tokens(other_tokenizer, vllm.url)


def test_checkpoint_with_another_tokenizer_is_refused(
    tiny_model: Path, other_tokenizer: Path
) -> None:
    expected = r"algorithm\.distillation\.teacher: .* has another tokenizer .*: the token '.*' has"
    with pytest.raises(ConfigError, match=expected):
        check_models(ModelConfig(path=tiny_model), distillation(teacher=str(other_tokenizer)))


def test_padded_vocabulary_is_no_other_tokenizer(tiny_model: Path, tmp_path: Path) -> None:
    """Larger models of a family often have more embeddings than tokens."""
    larger = tmp_path / "larger"
    shutil.copytree(tiny_model, larger)
    settings = json.loads((larger / "config.json").read_text())
    (larger / "config.json").write_text(json.dumps(settings | {"vocab_size": 640}))
    assert have_same_tokens(tiny_model, larger, "key")
    check_models(ModelConfig(path=tiny_model), distillation(teacher=str(larger)))


def test_engine_that_does_not_answer_is_one_line_of_error(tiny_model: Path, batch: Batch) -> None:
    url = "http://127.0.0.1:9"
    with pytest.raises(ConfigError, match=r"teacher: POST http://127.0.0.1:9/tokenize failed"):
        check_models(ModelConfig(path=tiny_model), distillation(teacher=url))
    teacher = EngineTeacher(url, Ranks(), concurrency=2)
    with pytest.raises(TrainingError, match=r"teacher: POST .* failed"):
        teacher.compute_logprobs(batch, temperature=1.0)
    with pytest.raises(TrainingError, match=r"at temperature 1, not 0\.7"):
        teacher.compute_logprobs(batch, temperature=0.7)


def test_settings_that_cannot_work_are_refused(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match="teacher"):
        distillation()
    with pytest.raises(ValueError, match="nothing is learnt from rewards; set"):
        config_of(tiny_model, algorithm={"advantage": "none"})
    with pytest.raises(ValueError, match=r"rollout\.temperature=0\.7: algorithm\.distillation"):
        config_of(
            tiny_model,
            algorithm={"advantage": "none", "distillation": {"teacher": "http://x"}},
            rollout={"temperature": 0.7},
        )


def test_k2_on_sampled_tokens_has_the_gradient_of_the_reverse_kl() -> None:
    """Exact expectation over the vocabulary of the policy's own distribution."""
    torch.manual_seed(0)
    logits = torch.randn(8, dtype=torch.float64, requires_grad=True)
    teacher = log_softmax(torch.randn(8, dtype=torch.float64), -1)

    def gradient(loss: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(loss, logits)
        return found

    logp = log_softmax(logits, -1)
    exact = gradient((logp.exp() * (logp - teacher)).sum())
    logp = log_softmax(logits, -1)
    sampled = gradient((logp.exp().detach() * K2().divergence(logp, teacher)).sum())
    torch.testing.assert_close(sampled, exact)


def test_only_the_teacher_is_learnt_from(tiny_model: Path, batch: Batch) -> None:
    """With advantage none, a policy that is its own teacher does not move."""
    from trainer.learning.models import build_models
    from trainer.learning.steps import update_policy

    algorithm = distillation(teacher=str(tiny_model))
    models: Models = build_models(ModelConfig(path=tiny_model), OptimizerConfig(lr=0.1), algorithm)
    assert models.teacher is not None
    batch.prox_logprobs = models.policy.compute_logprobs(batch, temperature=1.0).logprobs
    batch.teacher_logprobs = models.teacher.compute_logprobs(batch, temperature=1.0).logprobs
    models.algorithm.compute_advantages(batch)
    metrics = update_policy(
        models,
        batch,
        temperature=1.0,
        version=0,
        generator=torch.Generator(),
    )
    assert metrics["grad_norm"] < 1e-5
    assert metrics["distillation_loss"] < 1e-10
