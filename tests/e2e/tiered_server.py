"""Arguments of a vLLM with a host tier on a machine without a GPU (`host_tier`)."""

from __future__ import annotations

import json


def tiered_arguments(*, gib: float, load_s: float = 0.0) -> tuple[str, ...]:
    """The host tier has `gib` GiB, and a load takes `load_s` seconds in addition to the copy."""
    extra = {
        "spec_name": "RamOffloadingSpec",
        "spec_module_path": "tests.e2e.host_tier",
        "load_s": load_s,
    }
    return (
        *("--kv-offloading-size", str(gib)),
        *("--kv-transfer-config", json.dumps({"kv_connector_extra_config": extra})),
    )
