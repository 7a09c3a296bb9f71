"""Conversations with tools, by the clients that people use, against a server with a real model.

    python -m tests.tools.tool_clients MODEL   # such as SmolLM2's folder; needs openai, langchain-openai, pydantic-ai

For each of several formats a server is started, and each client has its call forced, whole and streamed, answers it,
and gets the model's last word. What a small model says does not count: that the calls arrive as the client's own types
does.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Callable
from typing import Any

from tests.server_process import serving

FORMATS = ("hermes", "llama3_json", "mistral", "qwen3_coder")
_ASK = "What is the weather in Rome?"
_SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Paris"]}, "days": {"type": "integer", "minimum": 1, "maximum": 3}},
    "required": ["city", "days"],
}
_TOOL = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": _SCHEMA}}


def _model_name(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        return str(json.load(answer)["data"][0]["id"])


def _check(arguments: dict[str, Any]) -> None:
    """Raise if arguments do not fit the schema."""
    if (
        set(arguments) != {"city", "days"}
        or arguments["city"] not in ("Rome", "Paris")
        or not 0 < arguments["days"] < 4
    ):
        raise AssertionError(arguments)


def with_openai(url: str) -> int:
    """Force a call, whole and streamed, answer it, and return how many calls came."""
    from openai import OpenAI  # noqa: PLC0415

    client: Any = OpenAI(base_url=f"{url}/v1", api_key="none")
    force: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
    fields: dict[str, Any] = {"model": _model_name(url), "tools": [_TOOL], "max_tokens": 200}
    messages: list[Any] = [{"role": "user", "content": _ASK}]
    answer = client.chat.completions.create(messages=messages, **force, **fields).choices[0].message
    with client.chat.completions.stream(messages=messages, **force, **fields) as stream:
        streamed = stream.get_final_completion().choices[0].message
    calls = [*(answer.tool_calls or []), *(streamed.tool_calls or [])]
    for call in calls:
        _check(json.loads(call.function.arguments))
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in answer.tool_calls or []]
    last = client.chat.completions.create(messages=[*messages, answer, *results], tool_choice="none", **fields)
    if not last.choices[0].message.content:
        raise AssertionError(last)
    return len(calls)


def with_langchain(url: str) -> int:
    """Do the same by LangChain."""
    from langchain_core.messages import HumanMessage, ToolMessage  # noqa: PLC0415
    from langchain_core.tools import tool  # noqa: PLC0415
    from langchain_openai import ChatOpenAI  # noqa: PLC0415

    @tool(args_schema=_SCHEMA)
    def weather(city: str, days: int) -> str:
        """Tells it."""
        return f"sunny in {city} for {days} days"

    settings: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "none", "max_tokens": 200}
    model = ChatOpenAI(model=_model_name(url), **settings)
    bound = model.bind_tools([weather], tool_choice="required", parallel_tool_calls=False)
    messages: list[Any] = [HumanMessage(_ASK)]
    answer: Any = bound.invoke(messages)
    chunks = list(bound.stream(messages))
    streamed: Any = chunks[0]
    for chunk in chunks[1:]:
        streamed = streamed + chunk
    calls = [*answer.tool_calls, *streamed.tool_calls]
    for call in calls:
        _check(call["args"])
    results = [ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls]
    messages += [answer, *results]
    if not model.invoke(messages).content:
        raise AssertionError(messages)
    return len(calls)


def with_pydantic_ai(url: str) -> int:
    """Do the same by pydantic-ai, whose output is a call that it requires."""
    from typing import Literal  # noqa: PLC0415

    from pydantic import BaseModel, Field  # noqa: PLC0415
    from pydantic_ai import Agent  # noqa: PLC0415
    from pydantic_ai.models.openai import OpenAIChatModel  # noqa: PLC0415
    from pydantic_ai.providers.openai import OpenAIProvider  # noqa: PLC0415

    class Weather(BaseModel):
        """Where, and for how many days."""

        city: Literal["Rome", "Paris"]
        days: int = Field(ge=1, le=3)

    model = OpenAIChatModel(_model_name(url), provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    agent = Agent(model, output_type=Weather, model_settings={"max_tokens": 200, "parallel_tool_calls": False})
    whole = agent.run_sync(_ASK)
    _check(whole.output.model_dump())
    streamed = agent.run_stream_sync(_ASK)
    _check(streamed.get_output().model_dump())
    _check(agent.run_sync("And tomorrow?", message_history=whole.all_messages()).output.model_dump())
    return 3


CLIENTS: tuple[Callable[[str], int], ...] = (with_openai, with_langchain, with_pydantic_ai)


def main(model: str) -> None:
    """Run all clients with all formats."""
    for name in FORMATS:
        with serving(model, "--tool-call-parser", name, "--max-model-len", "1024") as server:
            print(name, {client.__name__: client(server.url) for client in CLIENTS}, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
