"""No trick of the red team works in a task of a Ray cluster, either."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from proxy import wall
from proxy.machine import landlock
from tests.attacks.red_team.place import place, play
from tests.attacks.red_team.tricks import LEFT, TRICKS, left_out
from tests.needs import skip_or_fail
from tests.proxy.conftest import RunningProxy

try:
    import ray
except ImportError:
    skip_or_fail("ray is not installed: pip install 'agentic-rl[ray]'", at_import=True)

REFUSED = wall.missing() or landlock.missing_scopes()
pytestmark = pytest.mark.skipif(
    REFUSED is not None, reason=f"this machine has not the whole wall: {REFUSED}"
)


@pytest.fixture
def cluster() -> Iterator[None]:
    with ExitStack() as stack:
        # The paths of Ray's sockets would be too long in pytest's temporary folders.
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-"))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("RAY_TMPDIR", folder)
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
        stack.callback(ray.shutdown)
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
async def test_no_trick_works_in_a_ray_task(proxy: RunningProxy) -> None:
    async with place() as at:
        behind = await play(proxy, at, "ray", "light")
    assert set(behind.fooled) == set(LEFT)
    assert set(TRICKS) - set(left_out()) <= set(behind.tricks)
    assert not behind.worked, {name: behind.tricks.get(name) for name in behind.worked}
