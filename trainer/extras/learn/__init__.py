"""Learning from daily sessions (`agentic-train learn`), beside a running recorder.

    evidence ─▶ judging ─▶ rollouts ─▶ update ─▶ gates ─▶ canary ─▶ journal
    what        a value    tokens      one       is it    better    every decision,
    happened    per turn   to train    adapter   sane?    or not?   in a chain of hashes

Invariant: an adapter is a function of its parent and of the batch that the journal records for it.
A token is trained only if it was sampled in a session that has opted in and that has evidence.
`docs/notes/learn.md` has the design.
"""
