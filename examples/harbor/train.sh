#!/usr/bin/env bash
# Runs a harbor-server for the duration of a training run. Run it from the repository's root, after
# `make harbor` and `make agents`. Arguments go to agentic-train.
set -euo pipefail

. examples/harbor/server.sh 6
.venv/bin/python -m examples.harbor.make_tasks --out .cache/harbor_tasks
.venv/bin/agentic-train --config examples/harbor/agentic_trainer.yaml \
  "remote_agent.harbor.server_url=$harbor_server_url" "$@"
