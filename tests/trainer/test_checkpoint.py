"""Which checkpoint a run continues from, and that reading one runs no code of whoever wrote it."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from trainer import checkpoint
from trainer.checkpoint import FORMAT, Checkpoints, _export, as_in_source, with_untrained
from trainer.errors import CheckpointError
from trainer.run.state_folder import StateError, check_whole, read_metadata, read_state, write_state

STATE: dict[str, Any] = {
    "model": {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(2, dtype=torch.bfloat16)},
    "optimizer": {"lr": 1e-3, "betas": (0.9, 0.99), "name": "x", "none": None},
    "schedule": {"last_epoch": 4, "base_lrs": [1e-3]},
}


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    """Checkpoints of steps 1, 2 and 3."""
    for step in (1, 2, 3):
        folder = tmp_path / f"step-{step:06d}"
        folder.mkdir()
        write_state(STATE, folder / "state")
        (folder / "run.json").write_text(f'{{"step": {step}, "format": {FORMAT}}}')
    return Checkpoints(tmp_path, keep_last=2)


def newest(checkpoints: Checkpoints) -> int:
    saved = checkpoints.latest()
    assert saved is not None
    return saved.step


def test_names_of_somebody_elses_are_ignored_and_never_deleted(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    shutil.copytree(tmp_path / "step-000003", tmp_path / "step-000003-good")
    own = ["step-notes.txt", "step-9", "step-000099", "step-00000x", "step-", "step-000007.bak"]
    for name in own:
        (tmp_path / name).touch()
    # Folders that look like a checkpoint's, or like the rest of one that was being written.
    folders = [
        "step-0000001",
        "step-00000\N{ARABIC-INDIC DIGIT ONE}",
        ".step-notes",
        ".step-000001-good",
    ]
    for name in folders:
        (tmp_path / name).mkdir()
    own += folders
    assert newest(checkpoints) == 3
    checkpoints._prune(3)
    with suppress(AttributeError):
        checkpoints.save(4, None, {}, tmp_path)  # type: ignore[arg-type]
    left = {path.name for path in tmp_path.iterdir()} - {".step-000004"}
    assert left == {"step-000002", "step-000003", "step-000003-good", *own}


def damage_metadata(folder: Path) -> None:
    (folder / "state" / ".metadata").write_bytes(b"\x80\x05garbage")


def empty_metadata(folder: Path) -> None:
    (folder / "state" / ".metadata").write_bytes(b"")


def no_state(folder: Path) -> None:
    shutil.rmtree(folder / "state")


def cut_weights(folder: Path) -> None:
    (file,) = (folder / "state").glob("*.distcp")
    os.truncate(file, file.stat().st_size // 2)


def no_weights(folder: Path) -> None:
    (file,) = (folder / "state").glob("*.distcp")
    file.unlink()


def half_a_run_json(folder: Path) -> None:
    (folder / "run.json").write_text('{"step": 3, "form')


def run_json_is_a_list(folder: Path) -> None:
    (folder / "run.json").write_text("[]")


DAMAGE = [
    damage_metadata, empty_metadata, no_state, cut_weights, no_weights, half_a_run_json,
    run_json_is_a_list,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_newest_whole_checkpoint_is_used_and_the_damaged_one_named(
    damage: Any, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    damage(tmp_path / "step-000003")
    assert newest(checkpoints) == 2
    ((saved, why),) = checkpoints.damaged().items()
    assert saved.step == 3
    assert "step-000003" in why
    for step in (1, 2):
        damage(tmp_path / f"step-{step:06d}")
    with pytest.raises(CheckpointError, match=r"no checkpoint is whole.*trainer\.resume=never"):
        checkpoints.latest()


class OneWeight:
    """What a checkpoint is saved of."""

    def save_state(self, folder: Path) -> None:
        write_state(STATE, folder)

    def load_state(self, folder: Path) -> None: ...

    def save_adapter(self, folder: Path) -> None: ...

    def weights(self) -> Any:
        yield "a", torch.ones(3)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"a": torch.ones(3)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("keep_last", [1, 2])
def test_a_new_checkpoint_stays_beside_damaged_later_ones(
    keep_last: int, checkpoints: Checkpoints, model: Path, tmp_path: Path
) -> None:
    """A run continues before them, and saves more often now."""
    for step in (3, 2):
        cut_weights(tmp_path / f"step-{step:06d}")
        (tmp_path / f"step-{step:06d}").rename(tmp_path / f"step-{10 * step:06d}")
    kept = Checkpoints(tmp_path, keep_last=keep_last)
    for step in (4, 5, 6):
        saved = kept.save(step, OneWeight(), {}, model)
        assert kept.latest() == saved
    whole = {saved.step for saved in kept.all()} - {20, 30}
    assert whole == set(range(7 - keep_last, 7))


def test_old_checkpoint_that_cannot_be_deleted_ends_no_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that was moved and linked is left to its owner; of another, nothing counts any more."""
    kept = Checkpoints(tmp_path / "c", keep_last=1)
    saved = kept.save(1, OneWeight(), {}, model)
    moved = saved.path.rename(tmp_path / "moved")
    saved.path.symlink_to(moved)
    second = kept.save(2, OneWeight(), {}, model)
    assert moved.is_dir()
    assert not saved.path.exists()

    def refused(path: Path, **_: Any) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refused)
        checkpoint._delete(second.path)
    assert "could not be deleted" in caplog.text
    assert kept.all() == []
    kept.save(3, OneWeight(), {}, model)
    assert {path.name for path in (tmp_path / "c").iterdir()} == {"step-000003"}


def test_state_comes_back_as_it_was_written(tmp_path: Path) -> None:
    write_state(STATE, tmp_path)
    got: dict[str, Any] = {
        "model": {"a": torch.zeros(3, 4), "b": torch.zeros(2, dtype=torch.bfloat16)},
        "optimizer": {"lr": 0.0, "betas": (0.0, 0.0), "name": "", "none": 1},
        "schedule": {"last_epoch": 0, "base_lrs": [0.0]},
    }
    read_state(got, tmp_path)
    assert torch.equal(got["model"]["a"], STATE["model"]["a"])
    assert torch.equal(got["model"]["b"], STATE["model"]["b"])
    assert (got["optimizer"], got["schedule"]) == (STATE["optimizer"], STATE["schedule"])


class Runs:
    """An object whose unpickling writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_metadata_of_a_stranger_runs_no_code(tmp_path: Path) -> None:
    write_state(STATE, tmp_path / "state")
    metadata = read_metadata(tmp_path / "state")
    metadata.planner_data = Runs(tmp_path / "ran")  # where DCP keeps an object of any type
    (tmp_path / "state" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"posix\.mkdir.*would run code"):
        check_whole(tmp_path / "state")
    with pytest.raises(StateError, match="would run code"):
        read_state({"model": {"a": torch.zeros(3, 4)}}, tmp_path / "state")
    assert not (tmp_path / "ran").exists()


def test_value_of_a_stranger_runs_no_code(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="distributed is disabled"):
        save_distributed({"lr": Runs(tmp_path / "ran")}, checkpoint_id=tmp_path / "state")
    with pytest.raises(StateError, match="would run code"):
        read_state({"lr": 0.1}, tmp_path / "state")
    assert not (tmp_path / "ran").exists()


@settings(max_examples=200, deadline=None)
@given(at=st.integers(0, 2000), put=st.binary(max_size=8))
def test_metadata_of_any_bytes_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, at: int, put: bytes
) -> None:
    folder = tmp_path_factory.mktemp("any")
    write_state({"a": torch.zeros(2)}, folder)
    whole = (folder / ".metadata").read_bytes()
    at %= len(whole)
    (folder / ".metadata").write_bytes(whole[:at] + put + whole[at + 1 :])
    with suppress(CheckpointError):
        check_whole(folder)


def test_export_has_all_files_of_its_source_but_its_weights(tmp_path: Path) -> None:
    source, exported = tmp_path / "source", tmp_path / "exported"
    (source / "additional_chat_templates").mkdir(parents=True)
    exported.mkdir()
    files = {
        *("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"),
        *("merges.txt", "tokenizer.model", "qwen.tiktoken", "modeling_own.py"),
        *("LICENSE", "LICENSE.md", "NOTICE", "USE_POLICY.md"),
        "additional_chat_templates/tools.jinja",
    }
    for name in files:
        (source / name).write_text(name)
    for name in ("model.safetensors.index.json", "model-00001-of-00002.safetensors"):
        (source / name).write_text("of other weights")
    _export([("a", torch.ones(2))], source, exported)
    found = {
        path.relative_to(exported).as_posix(): path.read_bytes()
        for path in exported.rglob("*")
        if path.is_file()
    }
    assert found.pop("model.safetensors")
    assert found == {name: name.encode() for name in files}


def test_export_has_the_types_of_its_source(tmp_path: Path) -> None:
    save_file(
        {"a": torch.zeros(2, dtype=torch.bfloat16), "n": torch.zeros(2, dtype=torch.float32)},
        tmp_path / "model.safetensors",
    )
    trained = {"a": torch.ones(2), "n": torch.ones(2)}
    types = {name: tensor.dtype for name, tensor in as_in_source(trained.items(), tmp_path)}
    assert types == {"a": torch.bfloat16, "n": torch.float32}


@pytest.mark.parametrize("index", [True, False])
def test_second_form_of_the_weights_is_not_exported(index: bool, tmp_path: Path) -> None:
    """Mistral's folders have both."""
    name = "model-00001-of-00001.safetensors" if index else "model.safetensors"
    save_file({"a": torch.zeros(2)}, tmp_path / name)
    save_file({"layers.0.wq": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    (tmp_path / "config.json").write_text("{}")
    if index:
        found = '{"weight_map": {"a": "model-00001-of-00001.safetensors"}}'
        (tmp_path / "model.safetensors.index.json").write_text(found)
    whole = as_in_source(with_untrained([("a", torch.ones(2))], tmp_path), tmp_path)
    assert [each for each, _ in whole] == ["a"]


@pytest.mark.parametrize(
    ("trained", "said"),
    [
        ({"b": torch.ones(2)}, "b is not in"),
        ({"a": torch.ones(3)}, r"a has the shape \[3\], in .* \[2\]"),
        ({"a": torch.ones(2, 1)}, r"a has the shape \[2, 1\]"),
    ],
)
def test_export_with_another_name_or_shape_than_its_source_is_an_error(
    trained: dict[str, torch.Tensor], said: str, tmp_path: Path
) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=said):
        list(as_in_source(trained.items(), tmp_path))
