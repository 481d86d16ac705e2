#!/usr/bin/env bash
# examples/recipes/train.sh MODEL AGENT [--images] [--eight-gpus] [--tiny] [key=value …]
#
# Runs a recipe with a harbor-server of its own, from the repository's root, after `make harbor` and
# `make agents`. MODEL is a file of models/, AGENT one of agents/; --tiny makes a tiny one of MODEL's class.
set -euo pipefail

main() {  # read in full before it runs, because a run lasts longer than a checkout
  folder=examples/recipes
  for file in models/${1:-} agents/${2:-}; do
    test -f $folder/$file.yaml || {
      echo "usage: $0 MODEL AGENT [--images] [--eight-gpus] [--tiny] [key=value …]; there is no $file.yaml" >&2
      exit 2
    }
  done
  model=$1 agent=$2
  shift 2
  words=(--config $folder/swe.yaml --config "$folder/models/$model.yaml"
    --config "$folder/agents/$agent.yaml")
  named=("trainer.run_dir=runs/recipes/$model-$agent")
  tasks=(--out .cache/recipes/tasks)
  tiny=()
  own=()
  for word in "$@"; do
    case $word in
      --images)
        if [ "$agent" = mini-swe-agent ]; then
          echo "$0: mini-swe-agent cannot look at the pictures of --images" >&2
          exit 2
        fi
        words+=(--config $folder/images.yaml)
        tasks=(--out .cache/recipes/pictures --pictures)
        ;;
      --eight-gpus) words+=(--config $folder/eight_gpus.yaml) ;;
      --tiny)
        tiny=(--config $folder/tiny.yaml)  # after all others
        named=("model.path=.cache/recipes/models/$model" "trainer.run_dir=runs/recipes/tiny-$model-$agent")
        ;;
      *) own+=("$word") ;;
    esac
  done

  if [ ${#tiny[@]} -gt 0 ]; then
    .venv/bin/python -m benchmarks.install recipes torchvision
    export PYTHONPATH=.cache/torchvision${PYTHONPATH:+:$PYTHONPATH}  # prepares images on a CPU
  fi
  . examples/harbor/server.sh 32
  .venv/bin/python -m examples.recipes.make_tasks "${tasks[@]}"
  .venv/bin/agentic-train "${words[@]}" "${tiny[@]}" \
    "remote_agent.harbor.server_url=$harbor_server_url" "${named[@]}" "${own[@]}"
}

main "$@"; exit
