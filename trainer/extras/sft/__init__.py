"""Supervised fine-tuning on recorded sessions (`agentic-train sft`).

    sources ─▶ selection ─▶ demonstrations ─▶ schedule ─▶ fit
    where      which of     their tokens and  which of    one optimizer step
               them         what is trained   them when   per batch

Invariant: exactly the tokens of the recorded answers are trained, each once per epoch, whoever gave
the answers; every trial is marked with the source of its tokens. The n-th batch is a function of
the selected sessions, the seed and n alone.
"""
