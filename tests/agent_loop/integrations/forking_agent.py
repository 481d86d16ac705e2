"""An agent that knows nothing about verl: it asks a question and a follow-up question, and starts a
sub-agent."""

import json
import os
import urllib.request

URL = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
HEADERS = {
    "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
    "Content-Type": "application/json",
}


def ask(messages: list) -> dict:
    body = json.dumps({"model": "m", "messages": messages, "max_tokens": 50}).encode()
    request = urllib.request.Request(URL, body, HEADERS)
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]


main = [{"role": "user", "content": os.environ["TASK_PROMPT"]}]
main.append(ask(main))
main.append({"role": "user", "content": "The answer is a sum."})
main.append(ask(main))
if "sub-agent" in os.environ["TASK_PROMPT"]:
    ask([{"role": "system", "content": "You are a sub-agent."}, *main[:1]])
