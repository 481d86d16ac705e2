"""Runs Helm 4 by its Python bindings (`benchmarks.install helm`, Python 3.12). Imports nothing of
this project.

    python helm.py lint CHART                prints the messages as JSON
    python helm.py install CHART VALUES      installs a release; both are files, VALUES is JSON
                                             with `values` and `kubeconfig`

Prints `{"error": …}` if Helm refuses.
"""

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from helm_sdkpy.actions import Configuration, Install  # type: ignore[import-not-found]
from helm_sdkpy.chart import Lint  # type: ignore[import-not-found]
from helm_sdkpy.exceptions import HelmError  # type: ignore[import-not-found]


async def lint(chart: str) -> Any:
    return await Lint(Configuration()).run(chart)


async def install(chart: str, file: str) -> Any:
    given = json.loads(Path(file).read_text())
    configuration = Configuration(namespace="default", kubeconfig=given["kubeconfig"])
    try:
        release = await Install(configuration).run(
            "agentic", chart, values=given["values"], wait=False, timeout=60
        )
    except HelmError as error:
        return {"error": str(error)}
    return {"status": release["info"]["status"]}


if __name__ == "__main__":
    commands: dict[str, Callable[..., Coroutine[Any, Any, Any]]] = {
        "lint": lint,
        "install": install,
    }
    print(json.dumps(asyncio.run(commands[sys.argv[1]](*sys.argv[2:]))))
