"""The web application: routes, middleware and error handlers put together.

Takes the server's state; gives an ASGI app. It answers from the first moment: before the model
is loaded, `/health` says how far it is and everything that needs it is a 503.
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from manyroots.api import about
from manyroots.api.chat import chat_completions
from manyroots.api.completions import completions
from manyroots.api.errors import EXCEPTION_HANDLERS
from manyroots.api.lora import ADMIN_PATHS, LORA_ROUTES
from manyroots.api.middleware import HeaderLimits, Hosts, Keys, RequestIds, RootPath
from manyroots.api.state import ServerState
from manyroots.api.tokenization import detokenize, tokenize
from manyroots.config import ServerSettings


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


def create_app(state: ServerState) -> Starlette:
    settings = state.settings
    has_admin = settings.enable_lora_endpoints
    app = Starlette(
        routes=[
            Route("/live", about.live),
            Route("/health", about.health),
            Route("/ready", about.ready),
            Route("/ping", about.health, methods=["GET", "POST"]),
            Route("/load", about.load),
            Route("/version", about.version),
            Route("/metrics", about.metrics),
            Route("/v1/models", about.list_models),
            # A path, because the names of models on the hub have slashes.
            Route("/v1/models/{name:path}", about.show_model),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/detokenize", detokenize, methods=["POST"]),
            *(LORA_ROUTES if has_admin else ()),
        ],
        middleware=[
            Middleware(RequestIds),
            Middleware(HeaderLimits),
            Middleware(RootPath, root_path=settings.root_path),
            *_cors(settings),
            Middleware(
                Keys,
                api_key=settings.api_key,
                admin_key=settings.admin_key,
                admin_paths=ADMIN_PATHS if has_admin else frozenset(),
            ),
            Middleware(Hosts),
        ],
        exception_handlers=EXCEPTION_HANDLERS,
    )
    # Redirects are built from the Host header, which is the caller's to choose.
    app.router.redirect_slashes = False
    app.state.server = state
    return app
