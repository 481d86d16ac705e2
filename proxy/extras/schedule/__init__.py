"""Which sessions sample now, so that their paths fit the engines' KV caches.

`schedule` decides, on the book of each replica (`ledger`) and on how long sessions are usually away
at their tools (`away`). `openings` knows what sessions share. `admission` lets calls wait for the
decisions.
"""
