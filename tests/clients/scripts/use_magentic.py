"""magentic: functions whose bodies a model is: texts, streams and types. It reads annotations as
they are, so that they can't be postponed here."""

from typing import Annotated

from magentic import OpenaiChatModel, StreamedStr, prompt
from pydantic import BaseModel, Field
from reporting import KEY, MODEL, V1, main

ASKED = OpenaiChatModel(MODEL, base_url=V1, api_key=KEY, max_tokens=60, temperature=0)


class Book(BaseModel):
    title: Annotated[str, Field(max_length=20)]
    stars: Annotated[int, Field(ge=1, le=5)]


@prompt("Say hello to {name}.", model=ASKED)
def hello(name: str) -> str: ...


@prompt("Say hello.", model=ASKED)
def streamed() -> StreamedStr: ...


@prompt("Name a book.", model=ASKED)
def book() -> Book: ...


@prompt("Is Rome in Italy?", model=ASKED)
def is_it() -> bool: ...


def a_text() -> None:
    assert hello("Ann")


def a_stream() -> None:
    assert len(list(streamed())) > 1


def types() -> None:
    assert 1 <= book().stars <= 5
    assert is_it() in (True, False)


CHECKS = [a_text, a_stream, types]

if __name__ == "__main__":
    main(CHECKS)
