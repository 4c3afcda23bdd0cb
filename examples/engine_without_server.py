"""The engine below HTTP and text: submit token ids, receive token ids.

Runs where there is no web stack (no msgspec, ZMQ, Starlette), on a CPU or a GPU:

    python examples/engine_without_server.py --config DIR_WITH_CONFIG_JSON [--device cuda]

Weights are random (`load_format=dummy`), so the tokens mean nothing; the timings do.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from manyroots.config import engine_settings
from manyroots.engine.build import Engine, build_engine
from manyroots.ids import Namespace, RequestId
from manyroots.messages import Submit
from manyroots.sampling import SamplingParams


def run(engine: Engine, first_id: int, batch: int, prompt_len: int, num_tokens: int) -> float:
    """Seconds until `batch` random prompts have `num_tokens` tokens each."""
    rng = np.random.default_rng(first_id)
    sampling = SamplingParams(temperature=0, max_tokens=num_tokens)
    for number in range(batch):
        prompt = rng.integers(0, engine.info.vocab_size, prompt_len).tolist()
        namespace = Namespace(adapter=None, salt=None)
        submit = Submit(
            RequestId(first_id + number), prompt, namespace, sampling, 0, (), adapter=None
        )
        engine.loop.handle(submit)
    began = time.perf_counter()
    while engine.loop.has_work:
        engine.loop.step()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, help="folder with a config.json")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--num-tokens", type=int, default=128)
    arguments = parser.parse_args()
    began = time.perf_counter()
    engine = build_engine(
        engine_settings(
            {
                "model": arguments.config,
                "load_format": "dummy",
                "device": arguments.device,
                "dtype": arguments.dtype,
                "max_model_len": 2048,
                "enable_prefix_caching": False,
            }
        )
    )
    print(f"engine start {time.perf_counter() - began:.1f} s on {engine.info.device}")
    batch, length, count = arguments.batch, arguments.prompt_len, arguments.num_tokens
    run(engine, 0, batch, length, 4)
    prefill = run(engine, 1000, batch, length, 1)
    whole = run(engine, 2000, batch, length, count + 1)
    decode = whole - prefill
    print(
        f"batch {batch}: prefill {prefill:.3f} s, decode {count * batch / decode:.0f} tok/s "
        f"({decode / count * 1e3:.2f} ms per step)"
    )
    engine.loop.close()


if __name__ == "__main__":
    main()
