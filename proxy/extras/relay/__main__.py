"""`python -m proxy.relay` is `agentic-worker`."""

from proxy.extras.relay.cli import main

main()
