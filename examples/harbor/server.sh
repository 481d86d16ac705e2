# Sourced by the scripts that train on Harbor tasks, in the repository's root: starts a harbor-server
# that ends with the script, with the agents of `make agents` in its sandboxes. $1: number of trials
# at a time; HARBOR_SERVER_PORT (8090), HARBOR_STATE_DIR (runs/harbor-server). Sets
# HARBOR_SERVER_TOKEN and harbor_server_url.

# The agents' Python may be in the home folder, which a sandbox does not see. A sandbox sees no
# symbolic links to folders outside of it either.
agents=$(readlink -f .agents)
python=$(dirname "$(dirname "$(readlink -f .agents/python/bin/python)")")
sandbox="{\"path\": [\"$agents/bin\"], \"bind\": [\"$agents\", \"$python\"]}"

state=${HARBOR_STATE_DIR:-runs/harbor-server}
exec 3< <(LITELLM_LOCAL_MODEL_COST_MAP=True exec .harbor/bin/harbor-server \
  --port "${HARBOR_SERVER_PORT:-8090}" --state-dir "$state" --concurrency "$1" \
  --environment-kwargs "$sandbox")
server=$!
trap 'kill $server 2>/dev/null || true; wait 2>/dev/null || true' EXIT
read -r line <&3 || { echo "harbor-server did not start" >&2; exit 1; }
echo "$line"
harbor_server_url=${line##* }
HARBOR_SERVER_TOKEN=${HARBOR_SERVER_TOKEN:-$(cat "$state/token")}
export HARBOR_SERVER_TOKEN
