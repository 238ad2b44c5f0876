"""The official SDKs over the real HTTP server parse everything that the proxy emits (case T16)."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest
from proxy_app import App, running_app
from proxy_fakes import tool_call

from gyre.core.records import RoleClass
from gyre.replay.traces import read_trace

if TYPE_CHECKING:  # it takes more than a second to import, in every process that collects the tests
    import anthropic

TRACES = Path(__file__).parents[3] / "shared" / "traces"

WEATHER = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ANSWER = "<think>\nLet me look.\n</think>\n\nI will check ☔.\n" + tool_call(
    "weather", '{"city": "Oslo", "x": 10000.0}'
)
TWO_CALLS = tool_call("weather", '{"city": "A"}') + "\n" + tool_call("weather", '{"city": "B"}')


def answer(prompt: str) -> str:
    if "two" in prompt:
        return TWO_CALLS
    return "It rains." if "<tool_response>" in prompt else ANSWER


def anthropic_client(app: App) -> "anthropic.AsyncAnthropic":
    import anthropic

    return anthropic.AsyncAnthropic(base_url=app.url, api_key=app.access.api_key, max_retries=0)


def openai_client(app: App) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=app.url + "/v1", api_key=app.access.api_key, max_retries=0)


def prompt_tokens(app: App) -> int:
    return len(app.engines[0].requests[-1].input_ids)


@pytest.mark.parametrize("stream", [True, False])
async def test_T16_anthropic_sdk_runs_a_tool_loop(proxy_tokenizer: Any, stream: bool) -> None:
    async with running_app(proxy_tokenizer, answer) as app, anthropic_client(app) as client:
        request: dict[str, Any] = {
            "model": "claude-opus-5",
            "max_tokens": 500,
            "tools": [WEATHER],
            "system": "Be brief.",
        }
        history: list[Any] = [{"role": "user", "content": "Weather in Oslo?"}]

        async def ask() -> Any:
            if not stream:
                return await client.messages.create(messages=history, **request)
            async with client.messages.stream(messages=history, **request) as events:
                return await events.get_final_message()

        first = await ask()
        assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
        assert first.content[0].thinking == "Let me look."
        assert first.content[0].signature
        assert first.content[1].text == "I will check ☔."
        assert (first.content[2].name, first.content[2].input) == ("weather", {"city": "Oslo", "x": 10000.0})
        assert first.stop_reason == "tool_use"
        assert first.model == "claude-opus-5"
        assert first.usage.input_tokens == prompt_tokens(app)
        assert first.usage.output_tokens == len(app.sink.records[0].output_ids)
        history += [
            {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": first.content[2].id, "content": "rain"}],
            },
        ]
        second = await ask()
        assert [block.type for block in second.content] == ["text"]
        assert second.stop_reason == "end_turn"
        one, two = app.sink.records
        assert (two.parent, two.prefix_len) == (one.call_id, prompt_length(one) + len(one.output_ids))
        assert two.role is RoleClass.MAIN
        assert not two.drift
        assert app.engines[0].requests[1].input_ids[: two.prefix_len] == [
            *app.engines[0].requests[0].input_ids, *one.output_ids
        ]  # fmt: skip


def prompt_length(record: Any) -> int:
    return int(record.prefix_len) + len(record.delta_ids)


async def test_T16_parallel_calls_system_in_messages_no_tools_and_count_tokens(proxy_tokenizer: Any) -> None:
    async with running_app(proxy_tokenizer, answer) as app, anthropic_client(app) as client:
        messages: list[Any] = [
            {"role": "user", "content": [{"type": "text", "text": "two", "cache_control": {"type": "ephemeral"}}]},
            {"role": "system", "content": "An injected reminder."},
        ]
        system: list[Any] = [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.220.abc; cc_entrypoint=sdk-cli;"},
            {"type": "text", "text": "You are an agent."},
        ]
        request: dict[str, Any] = {"model": "m", "messages": messages, "system": system}
        counted = await client.messages.count_tokens(**request)
        async with client.beta.messages.stream(max_tokens=500, **request) as events:
            message = await events.get_final_message()
        assert counted.input_tokens == message.usage.input_tokens == prompt_tokens(app)
        assert [block.input for block in message.content if block.type == "tool_use"] == [{"city": "A"}, {"city": "B"}]
        assert len({block.id for block in message.content if block.type == "tool_use"}) == 2
        prompt = app.script.prompts[0]
        assert "billing" not in prompt
        assert "An injected reminder." in prompt
        empty = await client.messages.create(
            model="m", max_tokens=5, messages=[{"role": "user", "content": "x"}], tools=[]
        )
        assert empty.stop_reason == "max_tokens"
        assert empty.usage.output_tokens == 5


@pytest.mark.parametrize("stream", [True, False])
async def test_openai_sdk_runs_a_chat_tool_loop(proxy_tokenizer: Any, stream: bool) -> None:
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": WEATHER["input_schema"]}}
    async with running_app(proxy_tokenizer, answer) as app, openai_client(app) as client:
        history: list[Any] = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Weather?"}]

        async def ask() -> Any:
            if not stream:
                return await client.chat.completions.create(model="m", messages=history, tools=[tool])
            async with client.chat.completions.stream(
                model="m", messages=history, tools=[tool], stream_options={"include_usage": True}
            ) as events:
                async for _ in events:
                    pass
                return await events.get_final_completion()

        first = await ask()
        choice = first.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I will check ☔."
        assert choice.message.reasoning_content == "Let me look."
        call = choice.message.tool_calls[0]
        assert json.loads(call.function.arguments) == {"city": "Oslo", "x": 10000.0}
        assert first.usage.prompt_tokens == prompt_tokens(app)
        assert first.usage.completion_tokens == len(app.sink.records[0].output_ids)
        echoed = {
            "id": call.id,
            "type": "function",
            "function": call.function.model_dump(include={"name", "arguments"}),
        }
        history += [
            {"role": "assistant", "content": choice.message.content, "tool_calls": [echoed]},
            {"role": "tool", "tool_call_id": call.id, "content": "rain"},
        ]
        second = await ask()
        assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("It rains.", "stop")
        one, two = app.sink.records
        assert (two.parent, two.prefix_len) == (one.call_id, prompt_length(one) + len(one.output_ids))


@pytest.mark.parametrize("stream", [True, False])
async def test_openai_sdk_runs_a_responses_tool_loop(proxy_tokenizer: Any, stream: bool) -> None:
    tools: Any = [
        {"type": "namespace", "name": "sky", "description": "", "tools": [
            {"type": "function", "name": "weather", "parameters": WEATHER["input_schema"]}]},
        {"type": "web_search"},
    ]  # fmt: skip
    async with running_app(proxy_tokenizer, answer) as app, openai_client(app) as client:
        items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]}]

        async def ask() -> Any:
            request: dict[str, Any] = {"model": "m", "input": items, "tools": tools, "instructions": "Be brief."}
            if not stream:
                return await client.responses.create(**request)
            final, numbers = None, []
            async for event in await client.responses.create(stream=True, **request):
                numbers.append(event.sequence_number)
                if event.type == "response.completed":
                    final = event.response
            assert numbers == list(range(len(numbers)))
            return final

        first = await ask()
        assert first.status == "completed"
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
        assert first.output_text == "I will check ☔."
        call = first.output[2]
        assert (call.name, call.namespace) == ("weather", "sky")
        assert json.loads(call.arguments) == {"city": "Oslo", "x": 10000.0}
        assert first.usage.input_tokens == prompt_tokens(app)
        assert first.usage.total_tokens == prompt_tokens(app) + len(app.sink.records[0].output_ids)
        items += [item.model_dump(exclude_none=True) for item in first.output]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "rain"})
        assert (await ask()).output_text == "It rains."
        one, two = app.sink.records
        assert (two.parent, two.prefix_len) == (one.call_id, prompt_length(one) + len(one.output_ids))


async def test_overflow_has_the_form_that_makes_each_client_compact(proxy_tokenizer: Any) -> None:
    import anthropic

    async with running_app(proxy_tokenizer, answer, max_context=50) as app:
        async with anthropic_client(app) as client:
            with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 50 maximum"):
                await client.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "x" * 99}])
        async with openai_client(app) as client:
            with pytest.raises(openai.BadRequestError, match="maximum context length is 50 tokens") as caught:
                await client.responses.create(model="m", input="x" * 99)
            assert caught.value.code == "context_length_exceeded"
        assert app.sink.records == []
        assert app.engines[0].requests == []


async def test_auxiliary_model_gets_its_canned_answer(proxy_tokenizer: Any) -> None:
    async with running_app(proxy_tokenizer, answer) as app, openai_client(app) as client:
        reply = await client.chat.completions.create(model="small-model", messages=[{"role": "user", "content": "t"}])
        assert reply.choices[0].message.content == "A title"
        assert [model.id async for model in client.models.list()] == ["policy"]
        assert app.engines[0].requests == []


@pytest.mark.skipif(not TRACES.is_dir(), reason="../shared/traces is absent")
@pytest.mark.parametrize("trace", ["claude220_a_toolloop", "claude220_b_subagents", "claude328_a_toolloop"])
async def test_T16_the_sdk_reads_every_answer_to_recorded_claude_code_requests(
    proxy_tokenizer: Any, trace: str
) -> None:
    """System messages in the history, empty tools, billing headers, counting: as the harness sent them."""
    import anthropic
    from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent

    sent = list(read_trace(TRACES / f"{trace}.jsonl"))
    async with running_app(proxy_tokenizer, answer, max_context=10**6) as app, anthropic_client(app) as client:
        for exchange in sent:
            body = {**exchange.request, "stream": True}
            stream: Any = await client.post(
                "/v1/messages?beta=true",
                body=body,
                cast_to=Message,
                stream=True,
                stream_cls=anthropic.AsyncStream[RawMessageStreamEvent],
            )
            kinds = [event.type async for event in stream]
            assert kinds[0] == "message_start"
            assert kinds[-2:] == ["message_delta", "message_stop"]
            starts, stops = kinds.count("content_block_start"), kinds.count("content_block_stop")
            assert starts == stops > 0
            question = {k: body[k] for k in ("model", "messages", "system", "tools") if k in body}
            counted = await client.post("/v1/messages/count_tokens", body=question, cast_to=MessageTokensCount)
            assert counted.input_tokens > 1000
        assert len(sent) > 1
