"""`python -m proxy` is `agentic-proxy`."""

import sys

from proxy.cli import main

sys.exit(main())
