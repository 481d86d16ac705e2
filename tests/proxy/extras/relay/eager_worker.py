"""`agentic-worker` that does not wait long before it tries again to serve weights.

python -m tests.proxy.extras.relay.eager_worker ARGUMENT…
"""

from proxy.extras.relay import weight_updates
from proxy.extras.relay.cli import main

if __name__ == "__main__":
    weight_updates.RETRY_S = 0.5
    main()
