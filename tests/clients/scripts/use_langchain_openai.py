"""langchain-openai: chats, structured output in its three methods, tools, the Responses API."""

from __future__ import annotations

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field
from reporting import KEY, MODEL, V1, main


class Colour(BaseModel):
    """A colour."""

    name: str = Field(max_length=20)
    is_warm: bool


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"rain in {city}"


def model(**more: object) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=V1, api_key=KEY, model=MODEL, max_retries=0, timeout=300, temperature=0,
        **{"max_tokens": 200, **more},
    )  # fmt: skip


def chat() -> None:
    assert model(max_tokens=12).invoke("Name a colour.").content


def streamed() -> None:
    assert "".join(chunk.content for chunk in model(max_tokens=12).stream("Name a colour."))


def completion() -> None:
    llm = OpenAI(base_url=V1, api_key=KEY, model=MODEL, max_tokens=8, max_retries=0)
    assert llm.invoke("The sky is")


def structured_by_json_schema() -> None:
    answer = model().with_structured_output(Colour, method="json_schema").invoke("Name a colour.")
    assert isinstance(answer, Colour)


def structured_by_function_calling() -> None:
    chain = model().with_structured_output(Colour, method="function_calling")
    assert isinstance(chain.invoke("Name a colour."), Colour)


def structured_by_json_mode() -> None:
    chain = model(max_tokens=60).with_structured_output(
        Colour, method="json_mode", include_raw=True
    )
    asked = 'Name a colour as JSON: {"name": "...", "is_warm": true}'
    answer = chain.invoke(asked)
    assert answer["raw"].content.lstrip().startswith("{")


def tools() -> None:
    bound = model(max_tokens=100).bind_tools([weather], tool_choice="any")
    answer = bound.invoke("Weather in Oslo?")
    assert answer.tool_calls[0]["name"] == "weather"
    result = weather.invoke(answer.tool_calls[0])
    again = model(max_tokens=12).bind_tools([weather])
    again.invoke(["Weather in Oslo?", answer, result])


def responses_api() -> None:
    answer = model(max_tokens=16, use_responses_api=True).invoke("Name a colour.")
    assert answer.text


def embeddings() -> None:
    made = OpenAIEmbeddings(
        base_url=V1, api_key=KEY, model=MODEL, check_embedding_ctx_length=False, max_retries=0
    )
    assert len(made.embed_documents(["a cat", "tax law"])) == 2


CHECKS = [
    chat, streamed, completion, structured_by_json_schema, structured_by_function_calling,
    structured_by_json_mode, tools, responses_api, embeddings,
]  # fmt: skip

if __name__ == "__main__":
    main(CHECKS)
