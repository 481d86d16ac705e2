"""Writes the Helm chart (`make dist`): `python -m tests.deploy.write_chart dist/chart`.

The chart is the hand-written part of k8s/helm with a file of resources for each overlay of k8s/, as
kustomize builds it. The chart's template changes these resources by the chart's values, so that a
resource is described once, in the overlays. Namespaces are left out: Helm's users make them.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import yaml

from tests.deploy.manifests import HELM_SOURCE, OVERLAYS, render


def write_chart(chart: Path) -> None:
    """Writes the chart into a new folder."""
    shutil.copytree(HELM_SOURCE, chart)
    for overlay in OVERLAYS:
        resources = [each for each in render(overlay) if each["kind"] != "Namespace"]
        file = chart / f"objects/{overlay}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("---\n".join(yaml.safe_dump(each, width=1000) for each in resources))


if __name__ == "__main__":
    write_chart(Path(sys.argv[1]))
