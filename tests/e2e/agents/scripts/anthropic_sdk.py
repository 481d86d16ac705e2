"""The anthropic SDK: Messages with a tool, streamed."""

import os
import subprocess

import anthropic
from anthropic.types import ToolParam

client = anthropic.Anthropic()
TOOL: ToolParam = {
    "name": "run_command",
    "description": "Runs a shell command.",
    "input_schema": {
        "type": "object",
        "properties": {"command": {"type": "string"}},
        "required": ["command"],
    },
}
messages: list = [{"role": "user", "content": os.environ["TASK_PROMPT"]}]
while True:
    with client.messages.stream(
        model=os.environ["OPENAI_MODEL"], max_tokens=500, messages=messages, tools=[TOOL]
    ) as stream:
        reply = stream.get_final_message()
    messages.append({"role": "assistant", "content": reply.content})
    calls = [block for block in reply.content if block.type == "tool_use"]
    if not calls:
        break
    results = []
    for call in calls:
        done = subprocess.run(
            str(call.input["command"]), shell=True, capture_output=True, text=True, errors="replace"
        )
        results.append({"type": "tool_result", "tool_use_id": call.id, "content": done.stdout})
    messages.append({"role": "user", "content": results})
