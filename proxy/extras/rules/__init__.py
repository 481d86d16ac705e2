"""Search over what agents and models wrote, and rules that do it with each recorded turn."""
