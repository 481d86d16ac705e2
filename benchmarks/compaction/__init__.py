"""A task with a compaction: LangChain's agent collects words, and its summaries must keep them."""
