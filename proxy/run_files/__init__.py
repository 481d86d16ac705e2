"""The files of a training run, as docs/view.md describes them: whoever writes them, the trainer or
the requests by which another trainer publishes a run, writes them with this code."""
