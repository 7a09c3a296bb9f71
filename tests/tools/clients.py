"""Runs agents' and extraction clients against a server, unchanged: `python clients.py http://127.0.0.1:8000/v1`.

It needs none of nanovllm, so it runs in an environment of its own, with `pip install langchain-openai instructor
'pydantic-ai-slim[openai]' openai-agents litellm`. A client that is not installed is left out. What a model calls when
it may choose depends on the model; what is checked here holds for any. The packages of OpenAI and Anthropic themselves
are in `test_serve_api.py` and `test_serve_anthropic.py`.
"""

# Its clients are not in the environment that is checked.
# mypy: ignore-errors
# ruff: noqa: PLC0415

from __future__ import annotations

import asyncio
import json
import os
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, Literal

from pydantic import BaseModel

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
KEY = os.environ.get("NANOVLLM_API_KEY", "none")
ASK = "What is the weather in Paris?"
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}


class Weather(BaseModel):
    """A city's weather."""

    city: Literal["Paris", "Rome"]
    is_warm: bool


def with_langchain() -> None:
    """`bind_tools`, and `with_structured_output` by its default and by each of its methods; by responses too."""
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def weather(city: Literal["Paris", "Rome"]) -> str:
        """Say what the weather is like."""
        return f"sunny in {city}"

    model = ChatOpenAI(base_url=URL, api_key=KEY, model=_model(), max_retries=0, max_tokens=400)
    bound = model.bind_tools([weather], tool_choice="weather", parallel_tool_calls=False)
    message = bound.invoke(ASK)
    (call,) = message.tool_calls
    assert call["name"] == "weather" and call["args"]["city"] in ("Paris", "Rome")
    parts = list(bound.stream(ASK))
    whole = parts[0]
    for part in parts[1:]:
        whole += part
    assert whole.tool_calls[0]["args"]["city"] in ("Paris", "Rome")
    returned = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    model.bind_tools([weather]).invoke([HumanMessage(ASK), message, returned])
    for options in ({}, {"method": "json_schema"}, {"method": "function_calling"}):
        assert isinstance(model.with_structured_output(Weather, **options).invoke(ASK), Weather)
    responses = ChatOpenAI(base_url=URL, api_key=KEY, model=_model(), max_retries=0, use_responses_api=True)
    assert responses.bind_tools([weather], tool_choice="weather").invoke(ASK).tool_calls[0]["name"] == "weather"
    assert isinstance(responses.with_structured_output(Weather).invoke(ASK), Weather)


def with_instructor() -> None:
    """The default mode, which forces a call, whole and streamed."""
    import instructor
    from openai import OpenAI

    client = instructor.from_openai(OpenAI(base_url=URL, api_key=KEY, max_retries=0))
    messages = [{"role": "user", "content": ASK}]
    found = client.chat.completions.create(
        model=_model(), response_model=Weather, messages=messages, max_tokens=400, max_retries=0
    )
    assert isinstance(found, Weather)
    partial = client.chat.completions.create_partial(
        model=_model(), response_model=Weather, messages=messages, max_tokens=400
    )
    assert list(partial)[-1].city in ("Paris", "Rome")


def with_pydantic_ai() -> None:
    """An output type by the default mode, which requires a call, and by a schema; by chats and by responses."""
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=URL, api_key=KEY)
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        agent = Agent(kind(_model(), provider=provider), output_type=Weather, model_settings={"max_tokens": 400})
        assert isinstance(agent.run_sync(ASK).output, Weather)
        native = Agent(
            kind(_model(), provider=provider), output_type=NativeOutput(Weather), model_settings={"max_tokens": 400}
        )
        assert isinstance(native.run_sync(ASK).output, Weather)


def with_openai_agents() -> None:
    """An agent that must use a tool, which ends its run; and an output type. By chats and by responses."""
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)

    @function_tool
    def weather(city: Literal["Paris", "Rome"]) -> str:
        """Say what the weather is like."""
        return f"sunny in {city}"

    async def run(kind: Callable[..., Any]) -> None:
        model = kind(_model(), AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0))
        forced = ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=400)
        agent = Agent(
            "one", tools=[weather], model=model, model_settings=forced, tool_use_behavior="stop_on_first_tool"
        )
        assert (await Runner.run(agent, ASK)).final_output.startswith("sunny in ")
        streamed = Runner.run_streamed(agent, ASK)
        async for _ in streamed.stream_events():
            pass
        assert streamed.final_output.startswith("sunny in ")
        # After its call the agent answers, as it likes.
        await Runner.run(Agent("two", tools=[weather], model=model, model_settings=forced), ASK, max_turns=3)
        typed = Agent("three", output_type=Weather, model=model, model_settings=ModelSettings(max_tokens=400))
        assert isinstance((await Runner.run(typed, ASK)).final_output, Weather)

    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        asyncio.run(run(kind))


def with_litellm() -> None:
    """Chats with a required call, whole and streamed, and with a form; embeddings, responses, ranks, a long prompt."""
    import litellm

    given: dict[str, Any] = {"model": f"hosted_vllm/{_model()}", "api_base": URL, "api_key": KEY, "num_retries": 0}
    chat: dict[str, Any] = {**given, "messages": [{"role": "user", "content": ASK}], "max_tokens": 400}
    forced = {**chat, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    for answer in (
        litellm.completion(**forced),
        litellm.stream_chunk_builder(list(litellm.completion(**forced, stream=True))),
    ):
        (call,) = answer.choices[0].message.tool_calls
        assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    Weather.model_validate_json(litellm.completion(**chat, response_format=Weather).choices[0].message.content)
    assert litellm.embedding(**given, input=["a", "b"]).data[1]["embedding"]
    assert litellm.responses(**given, input=ASK, max_output_tokens=9).output
    ranked = litellm.rerank(**{**given, "api_base": URL.removesuffix("/v1")}, query="a", documents=["b", "a"], top_n=1)
    assert ranked.results[0]["index"] == 1
    try:
        litellm.completion(**{**chat, "messages": [{"role": "user", "content": "a b c " * 200_000}]})
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("a prompt that is too long was answered")


def _model() -> str:
    from openai import OpenAI

    return OpenAI(base_url=URL, api_key=KEY).models.list().data[0].id


CLIENTS: list[tuple[str, str, Callable[[], None]]] = [
    ("langchain-openai", "langchain_openai", with_langchain),
    ("instructor", "instructor", with_instructor),
    ("pydantic-ai-slim", "pydantic_ai", with_pydantic_ai),
    ("openai-agents", "agents", with_openai_agents),
    ("litellm", "litellm", with_litellm),
]


def main() -> int:
    """Run each client, print a line for it, and return how many have failed."""
    failed = 0
    for package, module, check in CLIENTS:
        if find_spec(module) is None:
            print(f"{package}: not installed", flush=True)
            continue
        try:
            check()
            result = "passed"
        except Exception:
            traceback.print_exc()
            failed, result = failed + 1, "FAILED"
        print(f"{package} {version(package)}, {check.__name__}: {result}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
