"""SQL of quotas in a PostgreSQL store: each turn is counted by the statement that writes it.

The row of a quota is locked until that statement is committed, so that two proxies never begin more
turns than the quota has. A statement that fails in a later part has changed nothing; one that finds
no room for its turn, or no session, changes nothing either, except that the quota may have counted
the turn: `GIVE_BACK` corrects that.
"""

from __future__ import annotations

from proxy.store import postgres_statements as statements
from proxy.store import quota_rows

BEGIN = (
    "WITH counted AS (UPDATE quotas SET turns = turns + 1"
    f" WHERE name = $15 AND {quota_rows.ALLOWS} RETURNING 1),"
    f" begun AS ({statements.begin('AND EXISTS (SELECT 1 FROM counted)')} RETURNING 1)"
    " SELECT (SELECT count(*) FROM counted), (SELECT count(*) FROM begun)"
)
GIVE_BACK = f"UPDATE quotas SET turns = {quota_rows.less('turns', '1')} WHERE name = $1"
CUT = (
    f"WITH cut AS ({statements.CUT} RETURNING 1),"
    f" counted AS (UPDATE quotas SET turns = {quota_rows.less('turns', '1')}"
    " WHERE name = $4 AND EXISTS (SELECT 1 FROM cut)) SELECT count(*) FROM cut"
)
COMMIT = (
    "WITH before AS (SELECT octet_length(sampled_ids) AS size FROM answers"
    " WHERE session_id = $1 AND idx = $2),"
    f" recorded AS ({statements.COMMIT} RETURNING octet_length(answers.sampled_ids) AS size),"
    " ended AS (SELECT"
    " CASE WHEN $16::boolean AND NOT EXISTS (SELECT 1 FROM before) THEN 1 ELSE 0 END AS turns,"
    " (coalesce((SELECT size FROM before), 0) - (SELECT size FROM recorded))"
    f" / {quota_rows.TOKEN_BYTES} AS tokens),"
    f" counted AS (UPDATE quotas SET turns = {quota_rows.less('quotas.turns', 'ended.turns')},"
    f" tokens = {quota_rows.less('quotas.tokens', 'ended.tokens')} FROM ended"
    " WHERE name = $15 AND EXISTS (SELECT 1 FROM recorded))"
    " SELECT count(*) FROM recorded"
)
SET = quota_rows.set_statement("$1::text", "$2::bigint", "$3::bigint", "$4::int")
