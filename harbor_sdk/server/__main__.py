"""`python -m harbor_sdk.server` is `harbor-server`."""

import sys

from harbor_sdk.server.cli import main

sys.exit(main())
