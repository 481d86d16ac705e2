"""`harbor-server`: Harbor trials over HTTP. Needs Python 3.12, in its own virtual environment."""
