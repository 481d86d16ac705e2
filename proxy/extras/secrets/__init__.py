"""Finds secrets in recorded sessions, masks them, and says which tokens spell them.

    find("export DB_PASSWORD=x7!kPq2")   (Secret(start=19, end=26, kind="password"),)
    mask("export DB_PASSWORD=x7!kPq2")   "export DB_PASSWORD=[secret:password]"
    untrained(ids, decode)               [T] True for each token with a character of a secret

`SessionSecrets` remembers the secrets of a session, so that each is masked everywhere in it.
"""

from proxy.extras.secrets.found import Secret, find
from proxy.extras.secrets.memory import Known, mask
from proxy.extras.secrets.session import SessionSecrets
from proxy.extras.secrets.tokens import untrained

__all__ = ["Known", "Secret", "SessionSecrets", "find", "mask", "untrained"]
