"""POST /tokenize, POST /detokenize and GET /tokenizer_info, as vLLM has them."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from manyroots.api.aside import aside
from manyroots.api.events import json_response
from manyroots.api.offered_tools import tool_use
from manyroots.api.preprocess import encode_chat
from manyroots.api.requests import DetokenizeRequest, TokenizeRequest
from manyroots.api.responses import Detokenized, Tokenized, TokenizerInfo
from manyroots.api.state import ServerState, Service, server_of
from manyroots.errors import RequestError, TooLongError


async def tokenize(request: Request) -> Response:
    """A prompt's or a chat's token ids."""
    server = server_of(request)
    body = await server.read(request, TokenizeRequest)
    service = server.service
    if body.model is not None:
        service.adapters.resolve(body.model)
    tokens = await asyncio.to_thread(_encode, server, service, body)
    texts = None
    if body.return_token_strs:
        spell = service.tokenizer.token_text
        texts = await aside(lambda: [spell(token) for token in tokens])
    return json_response(Tokenized(len(tokens), service.engine.info.max_model_len, tokens, texts))


def _encode(server: ServerState, service: Service, request: TokenizeRequest) -> list[int]:
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("give either prompt or messages.", field="prompt")
    if request.prompt is None:
        use = tool_use(request, server.notices)
        return encode_chat(service, request, use)[1]
    add_special_tokens = request.add_special_tokens is not False
    return service.input_processor.encode(request.prompt, add_special_tokens=add_special_tokens)


async def detokenize(request: Request) -> Response:
    """The text of token ids, special ones included."""
    server = server_of(request)
    body = await server.read(request, DetokenizeRequest)
    service = server.service
    if body.model is not None:
        service.adapters.resolve(body.model)
    text = await aside(lambda: _decode(service, body.tokens))
    return json_response(Detokenized(text))


def _decode(service: Service, tokens: list[int]) -> str:
    vocab_size = service.engine.info.vocab_size
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        place = next(i for i, token in enumerate(tokens) if not 0 <= token < vocab_size)
        raise RequestError(
            f"tokens[{place}] is {tokens[place]}; this model's ids are from 0 to {vocab_size - 1}.",
            field="tokens",
        )
    longest = service.engine.info.max_model_len
    if len(tokens) > longest:
        raise TooLongError(
            f"tokens has {len(tokens)} ids; this model's maximum context length is {longest}. "
            "Send fewer at a time.",
            field="tokens",
        )
    return service.tokenizer.decode(tokens, skip_special_tokens=False)


async def tokenizer_info(request: Request) -> Response:
    """The special tokens, and the template that chats are written with."""
    service = server_of(request).service
    template = service.template
    return json_response(
        TokenizerInfo(
            tokenizer_class="PreTrainedTokenizerFast",
            chat_template=None if template is None else template.source,
            model_max_length=service.engine.info.max_model_len,
            **service.tokenizer.special_tokens.for_template(),
        )
    )
