"""An environment with a tool: the answer can only be looked up."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

CODES = {"red": "1707", "blue": "2212"}


class LookupConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class LookupData(vf.TaskData):
    colour: str


class LookupToolset(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "codes"

    @vf.tool
    def code(self, colour: str) -> str:
        """The code of a colour."""
        return CODES[colour]


class LookupTask(vf.Task[LookupData, vf.State, LookupConfig]):
    @classmethod
    def toolsets(cls, config: LookupConfig) -> list[vf.Toolset]:
        return [LookupToolset(config.tools)]

    @vf.reward(weight=2.0)
    async def right_code(self, trace: vf.Trace) -> float:
        return float(CODES[self.data.colour] in trace.last_reply)


class LookupTasksetConfig(vf.TasksetConfig):
    task: LookupConfig = LookupConfig()


class LookupTaskset(vf.Taskset[LookupTask, LookupTasksetConfig]):
    def load(self) -> Iterator[LookupTask]:
        for colour in CODES:
            data = LookupData(name=colour, prompt=f"What is the code of {colour}?", colour=colour)
            yield LookupTask(data, self.config.task)


if __name__ == "__main__":
    LookupToolset.run()

__all__ = ["LookupTaskset"]
