"""The page that people look at: the records of a store, live, in the browser.

`api` answers the page's requests, `access` decides who may read it, and `client/` is the page
itself. Invariant: the page changes nothing in the record, and what agents and models wrote reaches
it as JSON text only.
"""
