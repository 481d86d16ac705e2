"""A language model as judge: the quickstart's policy learns from what a second model says about it.

The judge is a small model too, made by `make starter` from the judgements of `expert.py`. It reads
the prompt that `remote_agent.judge` sends, checks the agent's calls and answer against the order,
and ends with a reward. The run serves it with a vLLM of its own.
"""
