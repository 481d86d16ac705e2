"""What both engines that return only text (`text.py`, `chat.py`) check of a request."""

from __future__ import annotations

from proxy.engines.protocol import Sampling
from proxy.errors import RequestError

_NEUTRAL = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "structured": None}
"""Parameters that OpenAI's routes do not have, with their neutral values."""
MAX_STOPS = 4
"""OpenAI's own limit."""


def check_sampling(sampling: Sampling, engine: str) -> None:
    """Raises RequestError for a parameter that changes the answer and cannot be sent. `engine` is
    the engine's name in the message."""
    for name, neutral in _NEUTRAL.items():
        if (value := getattr(sampling, name)) != neutral:
            raise RequestError(f"{name}: {value!r} is not supported by {engine}", param=name)
    if sampling.logprobs or sampling.top_logprobs:
        raise RequestError(f"logprobs: {engine} has no log-probabilities", param="logprobs")
    if len(sampling.stop) > MAX_STOPS:
        raise RequestError(
            f"stop: got {len(sampling.stop)} strings; {engine} accepts {MAX_STOPS}", param="stop"
        )
