"""Which replica samples an answer, and how the answer goes on at another one."""
