#!/usr/bin/env bash
# Runs a harbor-server for the duration of a training run. Run it from the repository's root, after
# `make harbor` and `make agents`. Arguments go to agentic-train.
set -euo pipefail

# The agents' Python may be in the home folder, which a sandbox does not see.
python=$(dirname "$(dirname "$(readlink -f .agents/python/bin/python)")")
sandbox="{\"path\": [\"$PWD/.agents/bin\"], \"bind\": [\"$PWD/.agents\", \"$python\"]}"

exec 3< <(exec .harbor/bin/harbor-server --port "${HARBOR_SERVER_PORT:-8090}" \
  --state-dir runs/harbor-server --concurrency 6 --environment-kwargs "$sandbox")
server=$!
trap 'kill $server 2>/dev/null || true; wait 2>/dev/null || true' EXIT
read -r line <&3 || { echo "harbor-server did not start" >&2; exit 1; }
echo "$line"
HARBOR_SERVER_TOKEN=${HARBOR_SERVER_TOKEN:-$(cat runs/harbor-server/token)}
export HARBOR_SERVER_TOKEN

.venv/bin/python -m examples.harbor.make_tasks --out .cache/harbor_tasks
.venv/bin/agentic-train --config examples/harbor/agentic_trainer.yaml "$@"
