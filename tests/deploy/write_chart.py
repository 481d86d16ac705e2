"""Writes k8s/chart/objects from the overlays (`python -m tests.deploy.write_chart`).

The chart's templates change these resources by the chart's values, so that a resource is described
once, in the overlays. Namespaces are left out: Helm's users make them.
"""

from __future__ import annotations

import yaml

from tests.deploy.manifests import CHART, OVERLAYS, render


def chart_objects(overlay: str) -> str:
    """The file of an overlay in the chart."""
    resources = [each for each in render(overlay) if each["kind"] != "Namespace"]
    return "---\n".join(yaml.safe_dump(resource, width=1000) for resource in resources)


def main() -> None:
    for overlay in OVERLAYS:
        (CHART / f"objects/{overlay}.yaml").write_text(chart_objects(overlay))


if __name__ == "__main__":
    main()
