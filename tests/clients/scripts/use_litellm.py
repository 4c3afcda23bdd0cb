"""litellm: several turns with its own messages sent back, tools, streams, embeddings."""

from __future__ import annotations

import litellm
from reporting import KEY, MODEL, URL, V1, main

litellm.telemetry = False
COMMON = {"api_base": V1, "api_key": KEY, "num_retries": 0, "timeout": 300}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def several_turns() -> None:
    for provider in ("openai", "hosted_vllm"):
        history = [{"role": "user", "content": "Name a colour."}]
        for question in ("Another one.", "And why?"):
            answer = litellm.completion(
                f"{provider}/{MODEL}", messages=history, max_tokens=8, **COMMON
            )
            history += [answer.choices[0].message, {"role": "user", "content": question}]
        plain = [m if isinstance(m, dict) else m.model_dump() for m in history]
        litellm.completion(f"{provider}/{MODEL}", messages=plain, max_tokens=8, **COMMON)


def streamed() -> None:
    stream = litellm.completion(
        f"openai/{MODEL}", messages=[{"role": "user", "content": "Hi."}], stream=True,
        max_tokens=8, **COMMON,
    )  # fmt: skip
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream)


def tools() -> None:
    history: list[object] = [{"role": "user", "content": "Weather in Oslo?"}]
    answer = litellm.completion(
        f"openai/{MODEL}", messages=history, tools=[TOOL], tool_choice="required",
        max_tokens=100, temperature=0, **COMMON,
    )  # fmt: skip
    call = answer.choices[0].message.tool_calls[0]
    assert call.function.name == "weather"
    history.append(answer.choices[0].message)
    history.append({"role": "tool", "tool_call_id": call.id, "content": "rain"})
    litellm.completion(f"openai/{MODEL}", messages=history, tools=[TOOL], max_tokens=12, **COMMON)


def text_completion() -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", prompt="The sky is", max_tokens=6, **COMMON
    )
    assert answer.choices[0].text


def as_anthropic() -> None:
    answer = litellm.completion(
        f"anthropic/{MODEL}", messages=[{"role": "user", "content": "Hi."}], max_tokens=8,
        api_base=URL, api_key=KEY, timeout=300,
    )  # fmt: skip
    assert answer.choices[0].message.content


def embeddings() -> None:
    answer = litellm.embedding(f"openai/{MODEL}", input=["a cat"], **COMMON)
    assert answer.data[0]["embedding"]


CHECKS = [several_turns, streamed, tools, text_completion, as_anthropic, embeddings]

if __name__ == "__main__":
    main(CHECKS)
