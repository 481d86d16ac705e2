"""Tools for tests: of this project, and of your own agents, rewards, engines and rules.

`scripted_engine` is an inference server without a model, whose answers are a function of the
prompt. A test that starts a proxy before it sees exactly what an agent sends, decides what the
model says, and needs neither a GPU nor vLLM. Nothing else in the packages imports it.

Example:

    async with ScriptedEngine(lambda prompt_ids: [7, 7, 2]) as engine:
        ...  # a proxy with `engines: [engine.url]`
        assert engine.calls[0].answer_ids == [7, 7, 2]
"""
