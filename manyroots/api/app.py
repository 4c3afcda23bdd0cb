"""The web application: routes, middleware and error handlers put together.

Takes the server's state; gives an ASGI app. It answers from the first moment: before the model
is loaded, `/health` says how far it is and everything that needs it is a 503.
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from manyroots.api import about
from manyroots.api.anthropic.route import count_tokens, messages
from manyroots.api.anthropic.shapes import (
    CountTokensRequest,
    MessageAnswer,
    MessagesRequest,
    TokenCount,
)
from manyroots.api.chat import chat_completions
from manyroots.api.completions import completions
from manyroots.api.control import CONTROL_ENDPOINTS
from manyroots.api.embeddings import embeddings
from manyroots.api.endpoints import HTML, JSON, TEXT, Endpoint, post
from manyroots.api.errors import EXCEPTION_HANDLERS
from manyroots.api.lora import LORA_ENDPOINTS, list_adapters
from manyroots.api.middleware import (
    OPEN_PATHS,
    CloseOnDrain,
    HeaderLimits,
    Hosts,
    Keys,
    RequestIds,
    RootPath,
)
from manyroots.api.openai_responses.route import count_input_tokens, responses
from manyroots.api.openai_responses.shapes import (
    InputTokenCount,
    ResponseObject,
    ResponsesRequest,
)
from manyroots.api.openapi import openapi_endpoints
from manyroots.api.page.routes import page_endpoints, page_files, show_root
from manyroots.api.render import Rendered, render_chat, render_completion
from manyroots.api.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    TokenizeRequest,
)
from manyroots.api.responses import (
    AdapterStates,
    ChatCompletion,
    Completion,
    Detokenized,
    EmbeddingList,
    ModelCard,
    ModelList,
    Tokenized,
    TokenizerInfo,
)
from manyroots.api.score import LabelScores, PairScores, ScoreRequest, score
from manyroots.api.sglang_generate import (
    SglangCompletion,
    SglangGenerateRequest,
    sglang_generate,
)
from manyroots.api.state import ServerState
from manyroots.api.tokenization import detokenize, tokenize, tokenizer_info
from manyroots.server_config import ServerSettings


def _cors(settings: ServerSettings) -> list[Middleware]:
    """In front of the keys: a browser asks first, without one, and must be able to read errors."""
    if not settings.allowed_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=settings.allowed_methods,
            allow_headers=settings.allowed_headers,
            allow_credentials=settings.allow_credentials,
            expose_headers=("x-request-id", "retry-after"),
        )
    ]


def endpoints(settings: ServerSettings) -> list[Endpoint]:
    """Everything that this server answers."""
    known = [
        Endpoint("/", show_root if settings.page else about.root, "What this is; the page.",
                 media=(JSON, HTML) if settings.page else (JSON,)),
        Endpoint("/live", about.live, "Whether the process is up."),
        Endpoint("/health", about.health, "Whether it can answer."),
        Endpoint("/ready", about.ready, "Whether to send requests here."),
        Endpoint("/ping", about.health, "As /health.", methods=("GET", "POST")),
        Endpoint("/load", about.load, "How many sequences are alive."),
        Endpoint("/version", about.version, "The server's version."),
        Endpoint("/metrics", about.metrics, "Numbers for Prometheus.", media=(TEXT,)),
        Endpoint("/v1/models", about.list_models, "The model and its adapters.", answer=ModelList),
        Endpoint(
            "/v1/adapters", list_adapters, "Which adapter is on which tier.", answer=AdapterStates
        ),
        # A path, because the names of models on the hub have slashes.
        Endpoint("/v1/models/{name:path}", about.show_model, "One of them.", answer=ModelCard),
        post(
            "/v1/completions", completions, "Complete texts.", CompletionRequest, Completion,
            streams=True,
        ),
        post(
            "/v1/chat/completions", chat_completions, "Answer a chat.", ChatRequest, ChatCompletion,
            streams=True,
        ),
        post(
            "/v1/responses", responses, "Answer, as the Responses API.", ResponsesRequest,
            ResponseObject, streams=True,
        ),
        post(
            "/v1/responses/input_tokens", count_input_tokens, "How many tokens its prompt has.",
            ResponsesRequest, InputTokenCount,
        ),
        post(
            "/v1/messages", messages, "Answer, as Anthropic's API.", MessagesRequest,
            MessageAnswer, streams=True,
        ),
        post(
            "/v1/messages/count_tokens", count_tokens, "How many tokens its prompt has.",
            CountTokensRequest, TokenCount,
        ),
        post(
            "/v1/embeddings", embeddings, "Texts as vectors.", EmbeddingsRequest, EmbeddingList
        ),
        post(
            "/generate", sglang_generate, "Complete texts, as SGLang's own route.",
            SglangGenerateRequest, SglangCompletion | list[SglangCompletion], streams=True,
        ),
        *(
            post(path, score, "How near texts are, or how likely tokens after them.", ScoreRequest,
                 PairScores | LabelScores)
            for path in ("/score", "/v1/score")
        ),
        post(
            "/v1/chat/completions/render", render_chat, "What would be computed for a chat.",
            ChatRequest, Rendered,
        ),
        post(
            "/v1/completions/render", render_completion, "What would be computed for texts.",
            CompletionRequest, list[Rendered],
        ),
        post("/tokenize", tokenize, "A text's tokens.", TokenizeRequest, Tokenized),
        post("/detokenize", detokenize, "Tokens' text.", DetokenizeRequest, Detokenized),
        Endpoint(
            "/tokenizer_info", tokenizer_info, "Special tokens, and the chat template.",
            answer=TokenizerInfo,
        ),
        *page_endpoints(settings),
        *(CONTROL_ENDPOINTS if settings.admin_key is not None else ()),
        *(LORA_ENDPOINTS if settings.enable_lora_endpoints else ()),
    ]  # fmt: skip
    return [*known, *openapi_endpoints(known, root_path=settings.root_path)]


def _switched_off(settings: ServerSettings) -> dict[str, str]:
    """Paths that are not there, and the flags with which they would be."""
    off: dict[str, str] = {}
    if settings.admin_key is None:
        off |= dict.fromkeys((endpoint.path for endpoint in CONTROL_ENDPOINTS), "--admin-key KEY")
    if not settings.enable_lora_endpoints:
        flags = "--enable-lora --enable-lora-endpoints --admin-key KEY"
        off |= dict.fromkeys((endpoint.path for endpoint in LORA_ENDPOINTS), flags)
    return off


def create_app(state: ServerState) -> Starlette:
    settings = state.settings
    known = endpoints(settings)
    app = Starlette(
        routes=[endpoint.route() for endpoint in known],
        middleware=[
            Middleware(RequestIds),
            Middleware(CloseOnDrain, is_draining=lambda: state.is_draining),
            Middleware(HeaderLimits),
            Middleware(RootPath, root_path=settings.root_path),
            *_cors(settings),
            Middleware(
                Keys,
                api_key=settings.api_key,
                admin_key=settings.admin_key,
                admin_paths=frozenset(endpoint.path for endpoint in known if endpoint.is_admin),
                open_paths=OPEN_PATHS | (page_files().keys() if settings.page else set()),
                tenants=state.tenants,
            ),
            Middleware(Hosts),
        ],
        exception_handlers=EXCEPTION_HANDLERS,
    )
    # Redirects are built from the Host header, which is the caller's to choose.
    app.router.redirect_slashes = False
    app.state.server = state
    app.state.switched_off = _switched_off(settings)
    return app
