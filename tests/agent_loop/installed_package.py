"""An installed package: a folder with modules and a `.dist-info`, as pip leaves them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

EntryPoints = Mapping[str, Mapping[str, str]]
"""Group → name → `module:object`."""


def install(folder: Path, name: str, modules: Mapping[str, str], entry_points: EntryPoints) -> None:
    """Installs a package with these modules (name → source) into `folder`."""
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text)
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    groups = (
        f"[{group}]\n" + "".join(f"{key} = {path}\n" for key, path in points.items())
        for group, points in entry_points.items()
    )
    (info / "entry_points.txt").write_text("\n".join(groups))
