"""Downloads datasets of a Harbor registry with Harbor's own command.

Invariant: a folder with the name of a dataset holds all of its tasks; a download that was
interrupted leaves none.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path


class RegistryError(Exception):
    """A dataset of a registry cannot be downloaded."""


def download_dataset(
    dataset: str, folder: Path, *, registry: str | None = None, program: str = "harbor"
) -> Path:
    """The folder of the task folders of `name` or `name@version`, in `folder`. It is downloaded if
    it does not exist. `registry`: a `registry.json`, or its URL; None: Harbor's own registry.

    Raises:
        RegistryError: the program cannot be started, or the registry cannot be reached or does not
            have the dataset.
    """
    found = folder / dataset.replace("/", "__")
    if found.is_dir():
        return found
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as new:
        command = [program, "datasets", "download", dataset, "--export", "--output-dir", new]
        if registry is not None:
            is_url = registry.startswith(("http://", "https://"))
            command += ["--registry-url" if is_url else "--registry-path", registry]
        _run(command, dataset)
        (tasks,) = Path(new).iterdir()
        try:
            tasks.replace(found)
        except OSError:
            if not found.is_dir():  # another process has downloaded it meanwhile
                raise
    return found


def _run(command: list[str], dataset: str) -> None:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            encoding="utf-8",
        )
    except OSError as error:
        raise RegistryError(
            f"cannot start {command[0]!r} ({error.strerror}); run make harbor, and give the path "
            "of its program"
        ) from error
    if done.returncode != 0:
        lines = (done.stderr + done.stdout).strip().splitlines() or ["no output"]
        reason = next((line for line in lines if "Error" in line), lines[-1])
        raise RegistryError(f"{dataset}: harbor datasets download: {reason.strip()}")
