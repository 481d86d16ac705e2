"""A script for engines that fail: it goes on with an answer that another call began."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from proxy.testing.scripted_engine import Script


class Continued:
    """Answers as `script` does. A prompt that ends with a part of an answer gets the rest of it."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.answers: dict[tuple[int, ...], Sequence[int]] = {}
        """The whole answers, by the prompt that had none of their tokens."""

    def __call__(self, prompt_ids: list[int]) -> Sequence[int]:
        for prompt, answer in self.answers.items():
            done = len(prompt_ids) - len(prompt)
            if 0 <= done <= len(answer) and tuple(prompt_ids) == (*prompt, *answer[:done]):
                return answer[done:]
        whole = self._script(prompt_ids)
        assert not isinstance(whole, Awaitable)
        self.answers[tuple(prompt_ids)] = whole
        return whole
