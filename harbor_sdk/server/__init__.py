"""`harbor-server`: Harbor trials over HTTP. Runs on Python 3.12, in an environment of its own."""
