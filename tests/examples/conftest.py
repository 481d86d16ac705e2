from __future__ import annotations

from tests.proxy.conftest import checkpoint as checkpoint
from tests.proxy.conftest import proxy as proxy
from tests.proxy.conftest import rendering as rendering
from tests.proxy.conftest import start_proxy as start_proxy
