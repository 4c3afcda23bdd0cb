"""`manyroots adapters inspect DIR`: what an adapter is, and whether a model would serve it.

Exit code 0 if it would be served, 1 if not; without --model, only what every model would refuse
counts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from manyroots.config import ModelSettings
from manyroots.errors import AdapterError, ConfigError
from manyroots.lora.files.describe import AdapterDescription, ModuleSummary, describe_adapter


def add_adapters_command(commands: Any) -> None:
    adapters = commands.add_parser("adapters", help="inspect LoRA adapters")
    kinds = adapters.add_subparsers(required=True, metavar="WHAT")
    inspect = kinds.add_parser("inspect", help="what a folder holds, and whether it would load")
    inspect.add_argument("folder", metavar="DIR", help="folder with adapter_config.json")
    inspect.add_argument("--model", metavar="MODEL", help="folder, .gguf file or hub id")
    inspect.add_argument("--max-lora-rank", type=int, default=16, metavar="N", help="[16]")
    inspect.add_argument("--json", action="store_true", help="print JSON")
    inspect.set_defaults(run=_inspect)


def _inspect(arguments: dict[str, Any]) -> int:
    max_rank = arguments["max_lora_rank"]
    if max_rank < 1:
        raise ConfigError(f"--max-lora-rank is {max_rank}; it must be at least 1.")
    report: dict[str, Any] = {"folder": arguments["folder"], "model": arguments["model"]}
    try:
        report |= _facts(describe_adapter(arguments["folder"]))
        if arguments["model"] is not None:
            report |= _on_model(Path(arguments["folder"]), arguments["model"], max_rank)
    except AdapterError as error:
        report["refused"] = str(error)
    if arguments["json"]:
        print(json.dumps(report, indent=2))
    else:
        _print(report)
    return int("refused" in report)


def _facts(found: AdapterDescription) -> dict[str, Any]:
    return {
        "folder": str(found.folder),
        "digest": found.digest.hex(),
        "trained_on": found.base_model,
        "rank": found.rank,
        "rank_pattern": found.ranks,
        "alpha": found.alpha,
        "rslora": found.is_rank_stabilised,
        "invocation_tokens": found.invocation_tokens,
        "dtypes": found.dtypes,
        "num_tensors": found.num_tensors,
        "num_bytes": found.num_bytes,
        "modules": [_module(module) for module in found.modules],
    }


def _module(module: ModuleSummary) -> dict[str, Any]:
    return {
        "name": module.name,
        "num_pairs": module.num_pairs,
        "a_shapes": module.a_shapes,
        "b_shapes": module.b_shapes,
    }


def _on_model(folder: Path, model: str, max_rank: int) -> dict[str, Any]:
    from manyroots.engine.adapter_inspection import check_adapter

    # Shapes are nearly all that is needed: nothing is to be downloaded but the config.
    settings = ModelSettings(model=model, load_format="dummy")

    found = check_adapter(folder, settings, max_rank)
    loads_as = {"rank": found.spec.rank, "num_pairs": len(found.spec.pairs)}
    return {"loads_as": loads_as, "unchecked_base_weights": list(found.unchecked)}


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    # A digest or a path that is cut to the terminal's width is of no use.
    console = Console(highlight=False, soft_wrap=True)
    if "digest" in report:
        facts = Table(box=None, show_header=False)
        for label, value in _lines(report):
            facts.add_row(f"[bold]{label}[/bold]", escape(value))
        console.print(facts)
        modules = Table("module", "pairs", "A", "B", box=None)
        for module in report["modules"]:
            modules.add_row(
                escape(module["name"]),
                str(module["num_pairs"]),
                escape(_shapes(module["a_shapes"])),
                escape(_shapes(module["b_shapes"])),
            )
        console.print(modules)
    console.print(f"[bold]{escape(_verdict(report))}[/bold]")


def _lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    scaling = "alpha / sqrt(rank)" if report["rslora"] else "alpha / rank"
    lines = [
        ("folder", report["folder"]),
        ("digest", report["digest"]),
        ("trained on", report["trained_on"] or "not said"),
        ("rank", f"{report['rank']}, alpha {report['alpha']:g}, scaling {scaling}"),
        ("size", f"{report['num_bytes']:,} bytes, {report['num_tensors']:,} tensors, "
                 f"{', '.join(report['dtypes'])}"),
    ]  # fmt: skip
    if report["rank_pattern"]:
        others = ", ".join(f"{key}: {rank}" for key, rank in report["rank_pattern"].items())
        lines.append(("other ranks", others))
    if report["invocation_tokens"] is not None:
        tokens = " ".join(str(token) for token in report["invocation_tokens"])
        lines.append(("aLoRA", f"acts from the tokens {tokens} on"))
    return lines


def _shapes(shapes: tuple[tuple[int, ...], ...]) -> str:
    return " or ".join(" x ".join(str(size) for size in shape) for shape in shapes)


def _verdict(report: dict[str, Any]) -> str:
    if "refused" in report:
        return f"Would not load: {report['refused']}"
    if "loads_as" not in report:
        return "Files are in order. Whether a model would serve it: ask with --model."
    loaded = report["loads_as"]
    verdict = f"Loads on {report['model']}: {loaded['num_pairs']} pairs, rank {loaded['rank']}."
    if report["unchecked_base_weights"]:
        names = " and ".join(report["unchecked_base_weights"])
        verdict += (
            f" Its file repeats {names} of the model, whose weights are not here: a server refuses "
            "the adapter if they differ."
        )
    return verdict
