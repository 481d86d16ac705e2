"""Searches the record by words: what the page, saved rules and `sessions list --search` share."""
