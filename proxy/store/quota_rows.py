"""SQL and rules of quotas that all stores share."""

from __future__ import annotations

from proxy.records import Turn, TurnStatus

COLUMNS = "name, max_turns, max_tokens, turns, tokens"
ALL = f"SELECT {COLUMNS} FROM quotas ORDER BY name"
ALLOWS = "(max_turns IS NULL OR turns < max_turns) AND (max_tokens IS NULL OR tokens < max_tokens)"
"""The condition under which a turn may begin."""
TOKEN_BYTES = 4
"""Size of a sampled id in the column `sampled_ids`."""


def is_uncounted(turn: Turn) -> bool:
    """Whether an ended turn does not count, because it was never sampled."""
    return turn.status is not TurnStatus.DONE and len(turn.sampled_ids) == 0


def less(column: str, amount: str) -> str:
    """`column` without `amount`, and at least 0: a reset may have forgotten what is taken back."""
    return f"CASE WHEN {column} > {amount} THEN {column} - {amount} ELSE 0 END"


def remove_statement(name: str) -> str:
    """`name` is the database's placeholder."""
    return f"DELETE FROM quotas WHERE name = {name}"


def set_statement(name: str, max_turns: str, max_tokens: str, reset: str) -> str:
    """Sets a quota and returns it; the parameters are the database's placeholders."""
    kept = f"CASE WHEN {reset} = 1 THEN 0 ELSE quotas.{{0}} END"
    return (
        f"INSERT INTO quotas (name, max_turns, max_tokens) VALUES ({name}, {max_turns},"
        f" {max_tokens}) ON CONFLICT (name) DO UPDATE SET max_turns = excluded.max_turns,"
        f" max_tokens = excluded.max_tokens, turns = {kept.format('turns')},"
        f" tokens = {kept.format('tokens')} RETURNING {COLUMNS}"
    )
