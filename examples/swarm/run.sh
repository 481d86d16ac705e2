#!/usr/bin/env bash
# A swarm server and two clients with different tasks, to the end of the training; prints the
# held-out success before and after. Run it from the repository's root, after `make setup`.
# Both clients get the arguments. The trainer's log is runs/swarm/trainer.log.
set -euo pipefail

state=runs/swarm
exec 3< <(exec .venv/bin/agentic-train --swarm-server 127.0.0.1:0 --state-dir $state)
server=$! client=
trap 'kill $server $client 2>/dev/null || true; wait 2>/dev/null || true' EXIT
read -r line <&3 || { echo "the swarm server did not start" >&2; exit 1; }
echo "$line"
url=${line##* }

.venv/bin/python -m examples.swarm.client "$url" --share 1/2 --threads 4 "$@" &
client=$!
.venv/bin/python -m examples.swarm.client "$url" --share 2/2 --threads 4 "$@"
wait $client
client=
grep -E '^(evaluation|done) ' $state/trainer.log | tail -n 3
