"""Branches: sessions that begin with the recorded turns of another session.

`prefix` finds the recorded turn that a request asks for, `tolerance` decides which differences do
not count, and `divergence` describes a request that was not recorded. The calls themselves are in
`proxy/serving`.
"""
