"""`manyroots serve | generate | chat | adapters | bench | simulate | conformance`.

Parses, calls the room that does the work, and turns errors made for users into one line and
exit code 2. Each command imports what it needs when it runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from typing import Any

from manyroots.adapter_names import lora_modules
from manyroots.cli.adapters import add_adapters_command
from manyroots.cli.bench import add_bench_command
from manyroots.cli.conformance import add_conformance_command
from manyroots.cli.flags import (
    add_engine_flags,
    add_settings,
    engine_values,
    naming_file,
    with_config_file,
)
from manyroots.cli.simulate import add_simulate_command
from manyroots.config import ENGINE_ROOMS, engine_settings
from manyroots.errors import ManyrootsError
from manyroots.flag_aliases import translate
from manyroots.process.torch_allocator import keep_freed_memory
from manyroots.server_config import ServerSettings, check_together, server_settings
from manyroots.version import __version__


def main(argv: list[str] | None = None) -> int:
    words = argv
    if words is None:
        words = sys.argv[1:]
        keep_freed_memory()  # a process of our own, in which torch is not imported yet
    try:
        arguments = _parse(words)
        return int(arguments.run(vars(arguments)) or 0)
    except ManyrootsError as error:
        print(f"manyroots: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parse(words: list[str]) -> argparse.Namespace:
    parser, serve = _parser()
    if words[:1] == ["serve"]:
        known = {
            flag: action.type is int for action in serve._actions for flag in action.option_strings
        }
        ours, notes = translate(words[1:], known)
        words = ["serve", *ours]
        for note in notes:
            print(f"manyroots: note: {note}", file=sys.stderr)
    return parser.parse_args(words)


def _parser() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """All commands, and `serve` by itself."""
    parser = argparse.ArgumentParser(
        prog="manyroots", description="Serve one base model and many LoRA adapters."
    )
    parser.add_argument("--version", action="version", version=f"manyroots {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="OpenAI-compatible HTTP server", allow_abbrev=False)
    add_engine_flags(serve)
    add_settings(serve, ServerSettings, "server")
    serve.set_defaults(run=_serve)

    generate = commands.add_parser("generate", help="complete prompts and print them")
    generate.add_argument("prompt", nargs="+", help="text to complete; each one is a prompt")
    _add_sampling_flags(generate)
    _add_lora_flag(generate)
    _add_engine_flags_without_positional(generate)
    generate.set_defaults(run=_generate)

    chat = commands.add_parser("chat", help="chat with the model in this terminal")
    add_engine_flags(chat)
    _add_sampling_flags(chat)
    _add_lora_flag(chat)
    chat.add_argument("--system", help="system message")
    chat.set_defaults(run=_chat)

    add_adapters_command(commands)
    add_bench_command(commands)
    add_simulate_command(commands)
    add_conformance_command(commands)
    return parser, serve


def _add_engine_flags_without_positional(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=argparse.SUPPRESS, help="folder, .gguf file or hub id")
    parser.add_argument("--config", metavar="FILE.yaml", help="Read flags from this file, by name.")
    for room, cls in ENGINE_ROOMS.items():
        add_settings(parser, cls, room)


def _add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=256, metavar="N")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="[0: greedy]")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P")
    group.add_argument("--top-k", type=int, default=0, metavar="K")
    group.add_argument("--sampling-seed", type=int, default=None, metavar="SEED")


def _add_lora_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lora", metavar="NAME=FOLDER", help="adapter to use; implies --enable-lora"
    )


def _with_lora(engine: dict[str, Any], lora: str | None) -> tuple[dict[str, Any], str | None]:
    """Settings that know the adapter of --lora, and its name."""
    if lora is None:
        return engine, None
    known = engine.get("lora_modules") or []
    if any(module.name == lora for module in lora_modules(known)):
        return engine, lora
    [module] = lora_modules([lora])
    return {**engine, "enable_lora": True, "lora_modules": [*known, module]}, module.name


def _known(*classes: type[Any]) -> set[str]:
    return {spec.name for cls in classes for spec in dataclasses.fields(cls)}


def _serve(arguments: dict[str, Any]) -> int:
    from manyroots.api.server import serve
    from manyroots.engine.preflight import check_start
    from manyroots.text.generation_config import sampling_defaults

    rooms = (*ENGINE_ROOMS.values(), ServerSettings)
    values = with_config_file(arguments, rooms)
    server = {name: values[name] for name in _known(ServerSettings) if name in values}
    for name in ("api_key", "admin_key", "metrics_key"):
        from_environment = os.environ.get(f"MANYROOTS_{name.upper()}")
        if name not in server and from_environment:
            server[name] = from_environment
    with naming_file(arguments, rooms):
        engine, served = engine_settings(engine_values(values)), server_settings(server)
        check_together(engine, served)
    check_start(engine)
    # Its JSON alone; the model's own file is read with the model.
    sampling_defaults("", "none", engine.model.override_generation_config)
    return serve(engine, served)


def _generate(arguments: dict[str, Any]) -> int:
    engine, lora = _checked_engine(arguments)
    # Here, since it brings torch along: what can't work is told before that.
    from manyroots.cli.generate import generate

    return generate(arguments["prompt"], engine, _sampling(arguments), lora)


def _chat(arguments: dict[str, Any]) -> int:
    engine, lora = _checked_engine(arguments)
    # Here, since it brings torch along: what can't work is told before that.
    from manyroots.cli.chat import chat

    return chat(engine, _sampling(arguments), arguments["system"], lora)


def _checked_engine(arguments: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """The engine's settings, looked over, and the name of --lora's adapter."""
    from manyroots.engine.preflight import check_start

    rooms = tuple(ENGINE_ROOMS.values())
    engine, lora = _with_lora(engine_values(with_config_file(arguments, rooms)), arguments["lora"])
    with naming_file(arguments, rooms):
        settings = engine_settings(engine)
    check_start(settings, needed=lora)
    return engine, lora


def _sampling(arguments: dict[str, Any]) -> dict[str, Any]:
    names = ("max_tokens", "temperature", "top_p", "top_k")
    return {**{n: arguments[n] for n in names}, "seed": arguments["sampling_seed"]}
