"""The mains of a run: each trains to the end in its own way, over the same parts (`registry`)."""
