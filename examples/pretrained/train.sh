#!/usr/bin/env bash
# Records the starter model at the quickstart's task, fine-tunes Gemma 3 270M on these sessions,
# right and wrong ones, and trains the result by reinforcement learning. `make train-pretrained` runs
# it from the repository's root. Arguments go to the last command.
set -euo pipefail

# torch asks the system for huge pages: chunks of logits of 262,144 tokens are large, and are written
# a fifth sooner without a page fault for each 4 KiB.
export THP_MEM_ALLOC_ENABLE=1

config=examples/pretrained/agentic_trainer.yaml
recorded=.cache/pretrained/recorded
tuned=runs/pretrained-sft

if ! test -f $recorded/.complete; then  # an interrupted command is continued
  .venv/bin/agentic-train collect --config agentic_trainer.yaml --out $recorded --limit 256
  touch $recorded/.complete
fi
ls $tuned/checkpoints/step-*/model >/dev/null 2>&1 ||
  .venv/bin/agentic-train sft --config $config "sft.sessions=[$recorded]" sft.batch_sessions=8 \
    sft.held_out=0.06 sft.held_out_every=0 optimizer.lr=2e-5 optimizer.schedule=linear \
    optimizer.min_lr_ratio=0.1 trainer.run_dir=$tuned
checkpoint=$(ls -d $tuned/checkpoints/step-* | tail -n 1)
.venv/bin/agentic-train --config $config model.path="$checkpoint/model" "$@"
