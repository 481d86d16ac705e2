"""Each kind of weight arrives: for every class of docs/models.md, each one is sent alone, and all
with which vLLM computes is as after a fresh load; an update without it is an error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.e2e.test_weight_dtypes import digests, serving, updating
from tests.e2e.weight_kinds import changed, kind_of, written
from tests.gpu.vllm_on_gpu import TRAINED
from tests.trainer.policy.representatives import chosen
from trainer.errors import WeightSyncError

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NOT_COMPUTED = {"OLMo Hybrid": "vLLM 0.32 has kernels for its linear layers in Triton only"}
"""Classes that vLLM loads on a CPU, but does not serve there."""
LINEAR = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
"""Classes whose linear layers vLLM computes on a CPU in bfloat16 only."""


ALONE = {
    "Llama 3",
    "Qwen 3.5 MoE",
    "Gemma 4",
    "Phi-3 (4k)",
    "gpt-oss",
    "DeepSeek-V3",
    "Granite 3 MoE",
    "MiMo-V2-Flash",
}
"""One class of each way in which vLLM stacks and names weights. CI loads the others into a posing
vLLM (`tests/gpu`), and `make test-long` sends each of their kinds alone."""


def classes(refused: Mapping[str, str]) -> list[Any]:
    return [
        pytest.param(
            each.title,
            id=each.title,
            marks=[pytest.mark.xfail(strict=True, reason=refused[each.title])]
            if each.title in refused
            else [],
        )
        for each in TRAINED
    ]


@pytest.fixture(scope="module")
def sent_alone(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, Any]:
    titles = chosen(request.session, "sent_alone", "title")
    out = tmp_path_factory.mktemp("kinds") / "found.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.weight_kinds", out, *titles],
        env=os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize(
    "title",
    [
        pytest.param(each.title, marks=[pytest.mark.long] * (each.title not in ALONE))
        for each in TRAINED
    ],
)
def test_each_kind_of_weight_arrives_or_the_update_fails(
    sent_alone: Mapping[str, Any], title: str
) -> None:
    found = sent_alone[title]
    assert "error" not in found
    assert found["kinds"] >= 9
    assert found["wrong"] == []


@pytest.mark.long
@pytest.mark.parametrize("title", classes(NOT_COMPUTED))
def test_each_kind_of_weight_arrives_in_a_running_engine(title: str, tmp_path: Path) -> None:
    (architecture,) = (each for each in TRAINED if each.title == title)
    model, file = tmp_path / "model", tmp_path / "changed.safetensors"
    dtype = "bfloat16" if architecture.kind in LINEAR else "float32"
    weights = written(architecture, model, getattr(torch, dtype))
    seen = set[str]()
    kinds = sorted({kind_of(name) for name in weights})
    seen = set[str]()
    with serving(model, [dtype]) as urls, updating(*urls) as sync:

        def expected(sent: Mapping[str, torch.Tensor]) -> list[str]:
            save_file({name: tensor.contiguous() for name, tensor in sent.items()}, file)
            return [digest for (digest,) in sync.control.call_workers("fresh_digest", str(file))]

        for number, kind in enumerate(kinds, 1):
            new = changed(weights, kind, number)
            sync.push(new.items(), number)
            assert digests(sync) == expected(new), kind
            seen.update(digests(sync))
        assert len(seen) == len(kinds)
        for kind in kinds:
            rest = [(name, each) for name, each in weights.items() if kind_of(name) != kind]
            with pytest.raises(WeightSyncError):
                sync.push(rest, 100)
            sync.control.resume()
        sync.push(weights.items(), 101)
        assert digests(sync) == expected(weights)
