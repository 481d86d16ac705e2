"""A prompt's JSON does not depend on the prompts before it."""

from __future__ import annotations

import numpy as np
import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.engines.last_prompts import MIN_TOKENS
from proxy.engines.prompt_json import PromptJson

steps = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(-40, 40), st.booleans()), min_size=1, max_size=12
)


@settings(max_examples=60, deadline=None)
@given(steps, st.sampled_from([0, 40_000, 10**9]))
def test_json_equals_that_of_the_ids(steps: list[tuple[str, int, bool]], limit_bytes: int) -> None:
    prompts = PromptJson(limit_bytes)
    last = {name: np.arange(MIN_TOKENS, dtype=np.int32) for name in "ab"}
    for name, change, edit in steps:
        ids = last[name][: max(1, len(last[name]) + change)].copy()
        ids = np.append(ids, np.arange(max(0, change), dtype=np.int32))
        if edit:
            ids[len(ids) // 2] += 1
        assert orjson.loads(prompts.dump(ids, name)) == ids.tolist()
        last[name] = ids
