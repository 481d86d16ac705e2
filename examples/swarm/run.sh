#!/usr/bin/env bash
# A swarm server and two clients with different tasks, to the end of the training. Run from the
# repository's root, after `make starter`.
set -euo pipefail

exec 3< <(exec .venv/bin/agentic-train --swarm-server 127.0.0.1:0 --state-dir runs/swarm)
server=$!
trap 'kill $server; wait $server 2>/dev/null || true' EXIT
read -r line <&3 || { echo "the swarm server did not start" >&2; exit 1; }
echo "$line"
url=${line##* }

.venv/bin/python -m examples.swarm.client "$url" --share 1/2 --threads 4 "$@" &
.venv/bin/python -m examples.swarm.client "$url" --share 2/2 --threads 4 "$@"
wait -n $!
