"""The engine on a GPU beside the engine on the CPU: the same tokens, the same log-probabilities.

Needs a GPU and no pytest: `python -m tests.gpu.check` runs it by hand. Models are tiny and random.
"""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import torch

from manyroots.adapter_names import LoraModule
from manyroots.bench.random_adapters import targets_of, write_adapters
from manyroots.config import engine_settings
from manyroots.engine.build import build_engine
from manyroots.ids import AdapterName, Namespace, RequestId
from manyroots.kernels.tolerances import TOLERANCES
from manyroots.messages import FinishReason, Output, Submit
from manyroots.models.source import resolve_source
from manyroots.runner.cuda.runner import CudaRunner
from manyroots.sampling import SamplingParams
from tests.unit.models.tiny import save_tiny

KINDS = ("llama", "llama-biased", "mistral", "qwen2", "qwen3", "qwen3-moe")
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
"""Shapes that the kernels serve, but for the head's 97 tokens, which nothing divides."""
NUM_ADAPTERS, RANK = 3, 12
SCALE = 20
"""Random adapters are gentle; times this they change every token."""

Outputs = dict[int, list[Output]]


def make_model(folder: Path, kind: str) -> list[Path]:
    """A checkpoint in `folder / "base"`, and adapters for it."""
    sizes = dict(SIZES)
    if kind == "qwen3-moe":
        sizes["moe_intermediate_size"] = 128
    save_tiny(folder / "base", kind, **sizes)
    source = resolve_source(engine_settings({"model": str(folder / "base")}).model)
    paths = write_adapters(targets_of(source), folder, NUM_ADAPTERS, RANK)
    for path in paths:
        config = json.loads((path / "adapter_config.json").read_text())
        config["lora_alpha"] = SCALE * RANK
        (path / "adapter_config.json").write_text(json.dumps(config))
    return paths


def requests(*, with_adapters: bool, **sampling: Any) -> list[Submit]:
    """Prompts of one token to several pages, some beginning alike, over base and adapters."""
    generator = torch.Generator().manual_seed(11)
    shared = torch.randint(3, 97, (40,), generator=generator).tolist()
    made = []
    for number in range(10):
        tail = torch.randint(3, 97, (1 + 9 * number,), generator=generator).tolist()
        name = AdapterName(f"a{number % 4}") if with_adapters and number % 4 < 3 else None
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **sampling})
        prompt = tail if number % 3 else [*shared, *tail]
        made.append(
            Submit(
                RequestId(number + 1),
                prompt,
                Namespace(None, None),
                params,
                number,
                (),
                adapter=name,
            )
        )
    return made


def run(
    folder: Path,
    paths: list[Path],
    device: str,
    dtype: str,
    batches: list[list[Submit]],
    **more: Any,
) -> list[Outputs]:
    """What an engine gives for each batch, one after the other."""
    settings = {
        "model": str(folder / "base"), "device": device, "dtype": dtype, "max_num_seqs": 6,
        "max_num_batched_tokens": 128, "num_gpu_blocks_override": 256, "enable_lora": True,
        "max_loras": 2 if dtype == "float32" else 3, "max_lora_rank": 16,
        # Half precision repeats itself bit by bit only where nothing depends on when a load ends.
        "enable_prefix_caching": dtype == "float32",
        "lora_modules": tuple(LoraModule(f"a{i}", str(path)) for i, path in enumerate(paths)),
        **more,
    }  # fmt: skip
    engine = build_engine(engine_settings(settings))
    assert isinstance(engine.loop._runner, CudaRunner) == (device == "cuda")
    results = []
    for batch in batches:
        outputs: Outputs = {int(request.request_id): [] for request in batch}
        for request in batch:
            engine.loop.handle(request)
        while engine.loop.has_work or engine.loop.is_reading:
            if engine.loop.is_reading and not engine.loop.has_work:
                engine.loop.wait_for_read()
            for output in engine.loop.step():
                if output.finish_reason is FinishReason.ERROR:
                    raise AssertionError(f"{device}: {output.error}")
                outputs[int(output.request_id)].append(output)
        results.append(outputs)
    engine.loop.close()
    del engine
    gc.collect()
    return results


def tokens(outputs: Outputs) -> dict[int, list[int]]:
    return {number: [t for o in news for t in o.tokens] for number, news in outputs.items()}


def prompt_scores(outputs: Outputs) -> torch.Tensor:
    """The log-probability of every prompt token that has one, in a fixed order."""
    return torch.tensor(
        [e.logprob for n in sorted(outputs) for o in outputs[n] for e in o.prompt_logprobs]
    )


def check_rounding(kind: str, dtype: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """The GPU's errors against float32 are no larger than the CPU's in the same half precision.

    Elementwise the two can't be compared: these adapters are twenty times as strong as usual, and
    a rounding early in the model moves what comes out by tenths, on the CPU as well.
    """
    row = TOLERANCES["rounding", getattr(torch, dtype)]
    error, usual = float(ours.abs().mean()), float(theirs.abs().mean())
    assert error <= usual + row.atol + row.rtol * usual, (
        f"{kind} {dtype}: log-probabilities are {error} from float32's on average; {usual} is usual"
    )


def check(folder: Path, kind: str, dtype: str) -> str:
    """Raise AssertionError if the GPU differs from the CPU; else say what was compared."""
    paths = make_model(folder, kind)
    base, adapted = requests(with_adapters=False), requests(with_adapters=True)
    heated = requests(with_adapters=True, temperature=0.9)
    cut = requests(with_adapters=True, temperature=0.9, top_k=20)
    scored = requests(with_adapters=True, prompt_logprobs=0, max_tokens=1)
    batches = [base, adapted, adapted, heated, cut, scored]
    graphs = run(folder, paths, "cuda", dtype, batches)
    eager = run(folder, paths, "cuda", dtype, batches, enforce_eager=True)
    for index, (one, other) in enumerate(zip(graphs, eager, strict=True)):
        is_loading = index == 1 and dtype != "float32"
        assert is_loading or tokens(one) == tokens(other), f"{kind} {dtype}: graph in {index}"
    cpu = run(folder, paths, "cpu", dtype, batches)
    ours, theirs = prompt_scores(graphs[-1]), prompt_scores(cpu[-1])
    worst = float((ours - theirs).abs().max())
    if dtype == "float32":
        row = TOLERANCES["logits", torch.float32]
        torch.testing.assert_close(ours, theirs, atol=row.atol, rtol=row.rtol)
        for index, (one, other) in enumerate(zip(graphs, cpu, strict=True)):
            assert tokens(one) == tokens(other), f"{kind}: batch {index}, GPU and CPU differ"
    else:
        exact = prompt_scores(run(folder, paths, "cpu", "float32", batches)[-1])
        check_rounding(kind, dtype, ours - exact, theirs - exact)
    changed = sum(tokens(graphs[0])[n] != tokens(graphs[1])[n] for n in tokens(graphs[0]))
    assert changed >= 5, f"{kind} {dtype}: adapters changed {changed} of 10 outputs"
    return (
        f"{kind} {dtype}: graph = eager, {len(ours)} log-probabilities within "
        f"{worst:.1e} of the CPU's" + (", tokens equal" if dtype == "float32" else "")
    )
