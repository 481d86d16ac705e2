"""A run's folder that was copied to another machine, where the model it began with is not."""

from __future__ import annotations

import shutil
from pathlib import Path

from proxy.extras.view.run_folder import RecordedRun
from proxy.rendering.tokenizer import load_tokenizer
from tests.trainer.view.recorded_run import begin

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja")


def test_a_copied_run_has_the_tokenizer_of_its_last_checkpoint(
    checkpoint: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(checkpoint, model)
    folder = begin(tmp_path / "run", model)
    for step in ("step-000002", "step-000010"):
        saved = folder.checkpoints / step / "model"
        saved.mkdir(parents=True)
        for name in TOKENIZER:
            if (checkpoint / name).is_file():
                shutil.copy(checkpoint / name, saved)
    (folder.checkpoints / "step-000012" / "adapter").mkdir(parents=True)  # no model of its own
    shutil.rmtree(model)
    copied = tmp_path / "elsewhere" / "run"
    shutil.copytree(folder.path, copied)
    run = RecordedRun(copied)
    assert run.model == copied / "checkpoints" / "step-000010" / "model"
    tokenizer = load_tokenizer(run.model)
    assert tokenizer.decode(tokenizer.encode("3 lamps")) == "3 lamps"


def test_without_a_checkpoint_the_model_that_the_run_began_with_is_taken(
    checkpoint: Path, tmp_path: Path
) -> None:
    assert RecordedRun(begin(tmp_path / "run", checkpoint).path).model == checkpoint
    gone = begin(tmp_path / "other", tmp_path / "nowhere")
    assert RecordedRun(gone.path).model is None
