"""instructor: answers as pydantic models, by tools, by a schema and by JSON mode."""

from __future__ import annotations

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field
from reporting import KEY, MODEL, V1, main


class Colour(BaseModel):
    """A colour."""

    name: str = Field(max_length=20)
    is_warm: bool


def extract(mode: instructor.Mode) -> Colour:
    plain = OpenAI(base_url=V1, api_key=KEY, max_retries=0, timeout=300)
    client = instructor.from_openai(plain, mode=mode)
    return client.chat.completions.create(
        model=MODEL, response_model=Colour, max_tokens=600, temperature=0, max_retries=0,
        messages=[{"role": "user", "content": "Name a warm colour."}],
    )  # fmt: skip


def by_tools() -> None:
    assert isinstance(extract(instructor.Mode.TOOLS), Colour)


def by_schema() -> None:
    assert isinstance(extract(instructor.Mode.JSON_SCHEMA), Colour)


CHECKS = [by_tools, by_schema]

if __name__ == "__main__":
    main(CHECKS)
