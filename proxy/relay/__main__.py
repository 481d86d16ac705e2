"""`python -m proxy.relay` is `agentic-worker`."""

from proxy.relay.cli import main

main()
