from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from agent_loop.records import Task, Trial
from tests.proxy.conftest import checkpoint as checkpoint
from tests.proxy.conftest import proxy as proxy
from tests.proxy.conftest import rendering as rendering
from tests.proxy.conftest import start_proxy as start_proxy

MakeTrial = Callable[..., Trial]


@pytest.fixture
def make_trial(tmp_path: Path) -> MakeTrial:
    """`make_trial(timeout_s=…, **task_data)`: a trial with a directory, but no session."""

    def make(timeout_s: float = 120.0, **data: object) -> Trial:
        directory = tmp_path / "trial"
        directory.mkdir()
        return Trial(
            trial_id="t-1",
            task=Task("task", {"prompt": "do it", **data}),
            base_url="http://127.0.0.1:9/v1",
            api_key="key-of-t-1",
            model="policy",
            directory=directory,
            timeout_s=timeout_s,
        )

    return make
