"""The ledger of a deterministic run, and the commands that check it: audit, replay, forget.

    ledger.jsonl           a line per step, each with the hash of the line before it
    batches/step-000012    the groups of the step, as its trainer got them

`evidence` says what a step did, `ledger` writes it down, `audit` compares the lines with the
recorded sessions, `replay` computes the steps again.
"""
