"""Runs agents' and extraction clients against a server, unchanged: `python clients.py http://127.0.0.1:8000/v1`.

It needs none of nanovllm, so it runs in an environment of its own, with `pip install openai langchain-openai instructor
'pydantic-ai-slim[openai]' openai-agents anthropic litellm`. A client that is not installed is left out. What a model
calls when it may choose depends on the model; what is checked here holds for any.
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


def with_openai() -> None:
    """Chats: required, named, none and automatic calls, whole and streamed, and the turn after a call."""
    from openai import OpenAI

    client = OpenAI(base_url=URL, api_key=KEY, max_retries=0)
    model = client.models.list().data[0].id
    first: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": ASK}], "max_tokens": 400}
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        fields = {**first, "tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
        answer = client.chat.completions.create(**fields).choices[0]
        (call,) = answer.message.tool_calls
        assert answer.finish_reason == "tool_calls" and answer.message.content is None and call.id
        assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome") and call.function.name == "weather"
        with client.chat.completions.stream(**fields) as stream:
            streamed = stream.get_final_completion().choices[0]
        assert streamed.finish_reason == "tool_calls"
        assert json.loads(streamed.message.tool_calls[0].function.arguments)["city"] in ("Paris", "Rome")
    turns = [answer.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    for choice in ("auto", "none"):
        client.chat.completions.create(
            **{**first, "messages": [*first["messages"], *turns], "tools": [TOOL], "tool_choice": choice}
        )
    parsed = client.chat.completions.parse(**first, response_format=Weather).choices[0].message.parsed
    assert isinstance(parsed, Weather)
    with client.chat.completions.stream(**first, response_format=Weather) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Weather)


def with_openai_responses() -> None:
    """Responses: a required call, streamed too, and the turn after it."""
    from openai import OpenAI

    client = OpenAI(base_url=URL, api_key=KEY, max_retries=0)
    tool: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}
    fields: dict[str, Any] = {
        "model": client.models.list().data[0].id,
        "input": [{"role": "user", "content": ASK}],
        "tools": [tool],
        "max_output_tokens": 400,
        "parallel_tool_calls": False,
    }
    whole = client.responses.create(**fields, tool_choice="required")
    (call,) = whole.output
    assert call.type == "function_call" and json.loads(call.arguments)["city"] in ("Paris", "Rome")
    with client.responses.stream(**fields, tool_choice={"type": "function", "name": "weather"}) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output[0].name == "weather"
    assert kinds[2] == "response.output_item.added" and "response.function_call_arguments.done" in kinds
    done = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    client.responses.create(**{**fields, "input": [*fields["input"], call, done]})
    parsed = client.responses.parse(model=fields["model"], input=ASK, text_format=Weather, max_output_tokens=400)
    assert isinstance(parsed.output_parsed, Weather)


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


def with_anthropic() -> None:
    """Messages: a required and a named tool, whole and streamed, the turn after, and a parsed answer."""
    from anthropic import Anthropic

    client = Anthropic(base_url=URL.removesuffix("/v1"), api_key=KEY, max_retries=0)
    first: dict[str, Any] = {"model": _model(), "max_tokens": 400, "messages": [{"role": "user", "content": ASK}]}
    tools = [{"name": "weather", "input_schema": PARAMETERS}]
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather"}):
        whole = client.messages.create(**first, tools=tools, tool_choice=choice)
        with client.messages.stream(**first, tools=tools, tool_choice=choice) as stream:
            streamed = stream.get_final_message()
        for message in (whole, streamed):
            (call,) = message.content
            assert message.stop_reason == "tool_use" and call.input["city"] in ("Paris", "Rome")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    turns = [{"role": "assistant", "content": streamed.content}, {"role": "user", "content": [result]}]
    client.messages.create(**{**first, "messages": [*first["messages"], *turns]}, tools=tools)
    assert isinstance(client.messages.parse(**first, output_format=Weather).parsed_output, Weather)


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
    ("openai", "openai", with_openai),
    ("openai", "openai", with_openai_responses),
    ("langchain-openai", "langchain_openai", with_langchain),
    ("instructor", "instructor", with_instructor),
    ("pydantic-ai-slim", "pydantic_ai", with_pydantic_ai),
    ("openai-agents", "agents", with_openai_agents),
    ("anthropic", "anthropic", with_anthropic),
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
