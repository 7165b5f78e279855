"""OpenAI's ``/v1/completions`` and ``/v1/chat/completions``, with vLLM's additional fields."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rollwire_client._gateway.answers import EventAnswer, json_answer
from rollwire_client._gateway.errors import invalid
from rollwire_client._gateway.fields import Fields, is_token_ids
from rollwire_client._gateway.openai_answers import ChoiceShape, TextRequest, TokenFields
from rollwire_client._gateway.sampler import SampleRequest
from rollwire_client._gateway.sampling import openai_options, with_rollout_fields

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollwire_client._gateway.gateway import Gateway
    from rollwire_client._gateway.tokenizer import ChatTokenizer

# Fields that change nothing of what is sampled.
_IGNORED = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "priority", "request_id", "cache_salt", "parallel_tool_calls",
)  # fmt: skip


async def chat_completions(gateway: Gateway, fields: Fields, session: str) -> Any:
    model = gateway.checked_model(fields.text("model"))
    tokenizer = gateway.tokenizer_for("chat")
    messages = fields.take("messages")
    if not isinstance(messages, list) or not messages:
        raise fields.wrong("messages", messages, "a list of messages")
    tools, parses = _tools(fields, tokenizer)
    settings = fields.take("chat_template_kwargs", {})
    if not isinstance(settings, dict) or _TEMPLATE_ARGUMENTS & settings.keys():
        raise fields.wrong("chat_template_kwargs", settings, "the template's own settings")
    fields.only("chat_template")
    fields.only("documents", [])
    fields.only("modalities", ["text"])
    fields.only("audio")
    fields.only("reasoning_effort")
    fields.only("functions", [])
    fields.only("function_call", "none")
    response_format = fields.object("response_format")
    response_format.only("type", "text")
    response_format.end()
    fields.off("echo")
    fields.off("add_special_tokens")  # templates write their own
    logprobs = fields.boolean("logprobs")
    fields.only("top_logprobs", 0)
    generation_prompt = fields.boolean("add_generation_prompt", default=True)
    continued = fields.boolean("continue_final_message")
    if generation_prompt and continued:
        raise invalid(
            "continue_final_message needs add_generation_prompt false", "continue_final_message"
        )
    finish = _common(gateway, fields, model, session, chat=True)
    ids = await tokenizer.render(
        messages,
        tools,
        settings,
        add_generation_prompt=generation_prompt,
        continue_final_message=continued,
    )
    request = finish([ids], logprobs=logprobs, echo=[""])
    if parses:
        request = replace(request, parsed_tools=tools)
    return await _answer(gateway, request)


_TEMPLATE_ARGUMENTS = {
    "chat_template", "tokenize", "return_dict", "return_tensors", "tools", "conversation",
    "add_generation_prompt", "continue_final_message",
}  # fmt: skip


def _tools(fields: Fields, tokenizer: ChatTokenizer) -> tuple[list[Any], bool]:
    """The tools of a request, and whether to look for calls of them."""
    tools = fields.take("tools", [])
    choice = fields.take("tool_choice", "auto" if tools else "none")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise fields.wrong("tools", tools, "a list of tools")
    if choice not in ("auto", "none"):
        raise invalid(
            "tool_choice can be 'auto' or 'none': the policy is not made to call a tool",
            "tool_choice",
            "unsupported_value",
        )
    if tools and choice == "auto" and not tokenizer.parses_tools:
        raise invalid(
            "this gateway does not look for calls of tools (--renderer): send tool_choice 'none' "
            "for a prompt with the tools, and find the calls in the text or the token ids",
            "tool_choice",
            "unsupported_value",
        )
    return tools, bool(tools) and choice == "auto"


async def completions(gateway: Gateway, fields: Fields, session: str) -> Any:
    model = gateway.checked_model(fields.text("model"))
    prompt = fields.take("prompt")
    special = fields.boolean("add_special_tokens", default=True)
    fields.only("suffix", "")
    echo = fields.boolean("echo")
    logprobs = fields.integer("logprobs", minimum=0, maximum=1)
    fields.only("response_format", {"type": "text"})
    finish = _common(gateway, fields, model, session, chat=False)
    tokenizer = gateway.tokenizer_for("completions")
    prompts = [prompt] if isinstance(prompt, str) or is_token_ids(prompt) else prompt
    if not isinstance(prompts, list) or not prompts:
        raise fields.wrong("prompt", prompt, "a text, token ids, or a list of these")
    ids, texts = [], []
    for item in prompts:
        if isinstance(item, str):
            ids.append(await tokenizer.encode(item, special_tokens=special))
        elif is_token_ids(item):
            ids.append(item)
        else:
            raise fields.wrong("prompt", item, "a text, token ids, or a list of these")
        texts.append(item if isinstance(item, str) else None)
    if echo and (logprobs is not None or None in texts):
        raise invalid("echo is supported for prompts of text, without logprobs", "echo")
    begin = [text if echo and text is not None else "" for text in texts]
    return await _answer(gateway, finish(ids, logprobs=logprobs is not None, echo=begin))


def _common(gateway: Gateway, fields: Fields, model: str, session: str, *, chat: bool) -> Any:
    """Reads what both endpoints have; returns what makes the request of its prompts."""
    name = fields.text("request_id") or ""
    stream = fields.boolean("stream")
    stream_options = fields.object("stream_options")
    include_usage = stream_options.boolean("include_usage")
    stream_options.off("continuous_usage_stats")
    stream_options.ignore(("include_obfuscation",))
    stream_options.end()
    as_ids = fields.boolean("return_tokens_as_token_ids")
    token_ids = fields.boolean("return_token_ids")
    options = with_rollout_fields(openai_options(fields), fields)
    fields.ignore(_IGNORED)
    fields.end()

    def finish(prompts: list[list[int]], *, logprobs: bool, echo: Sequence[str]) -> TextRequest:
        detokenizer = None
        if stream or options.stop:
            detokenizer = gateway.tokenizer_for("text").detokenizer(
                options.stop, skip_special_tokens=options.skip_special_tokens
            )
        return TextRequest(
            sample=SampleRequest(prompts, options, session, name, detokenizer),
            tokens=TokenFields(logprobs, as_ids, token_ids),
            model=model,
            chat=chat,
            stream=stream,
            include_usage=include_usage,
            skip_special_tokens=options.skip_special_tokens,
            echo=echo,
        )

    return finish


async def _answer(gateway: Gateway, request: TextRequest) -> Any:
    shape = ChoiceShape(gateway, request)
    if request.stream:
        return EventAnswer(shape.stream, gateway.heartbeat)
    trajectories = await gateway.sampler.run(request.sample)
    return json_answer(await shape.whole(trajectories))


async def models(gateway: Gateway) -> Any:
    context_length = await gateway.context_length()
    return json_answer(
        {
            "object": "list",
            "data": [
                {
                    "id": name,
                    "object": "model",
                    "created": gateway.started_at,
                    "owned_by": "rollwire",
                    "max_model_len": context_length,
                }
                for name in gateway.model_names
            ],
        }
    )
