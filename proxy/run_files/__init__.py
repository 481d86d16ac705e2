"""The files of a training run (docs/publishing.md): whoever writes them, the trainer or
the requests by which another trainer publishes a run, writes them with this code."""
