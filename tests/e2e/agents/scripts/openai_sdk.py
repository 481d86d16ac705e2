"""The openai SDK: Chat Completions with a tool, streamed; then Responses with the same tool."""

import json
import os
import subprocess

from openai import OpenAI
from openai.types.chat import ChatCompletionFunctionToolParam
from openai.types.responses import FunctionToolParam

PARAMETERS: dict[str, object] = {
    "type": "object",
    "properties": {"command": {"type": "string"}},
    "required": ["command"],
}
client = OpenAI()
MODEL = os.environ["OPENAI_MODEL"]


def run(command: str) -> str:
    return subprocess.run(
        command, shell=True, capture_output=True, text=True, errors="replace"
    ).stdout


def chat() -> None:
    tool: ChatCompletionFunctionToolParam = {
        "type": "function",
        "function": {"name": "run_command", "parameters": PARAMETERS},
    }
    messages: list = [{"role": "user", "content": os.environ["TASK_PROMPT"]}]
    while True:
        with client.chat.completions.stream(model=MODEL, messages=messages, tools=[tool]) as stream:
            message = stream.get_final_completion().choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return
        for call in message.tool_calls:
            output = run(json.loads(call.function.arguments)["command"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": output})


def responses() -> None:
    tool: FunctionToolParam = {
        "type": "function",
        "name": "run_command",
        "parameters": PARAMETERS,
        "strict": None,
    }
    given: list = [{"role": "user", "content": os.environ["TASK_PROMPT"]}]
    previous = None
    while True:
        reply = client.responses.create(
            model=MODEL, input=given, tools=[tool], previous_response_id=previous
        )
        calls = [item for item in reply.output if item.type == "function_call"]
        if not calls:
            return
        previous = reply.id
        given = [
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": run(json.loads(call.arguments)["command"]),
            }
            for call in calls
        ]


{"chat": chat, "responses": responses}[os.environ["DIALECT"]]()
