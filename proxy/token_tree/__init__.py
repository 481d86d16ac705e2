"""The recorded tokens of a session: which of them a request continues, or why it forks.

`tree` places requests, `fork_cause` compares an assistant's message with the recorded answers, and
`paths` assembles a turn's tokens from those that each turn on its path added.
"""
