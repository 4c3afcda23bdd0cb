"""Drafts of a model's prediction layer (MTP) through the real engine (V07)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from manyroots import LLM, LoRARequest, SamplingParams
from manyroots.errors import ConfigError, ModelError
from manyroots.models.decoder import Decoder
from manyroots.speculative_config import parse_speculation
from manyroots.structured_outputs import StructuredOutputsParams
from tests.helpers.adapter_folders import write_adapter
from tests.helpers.prediction_layers import add_prediction
from tests.helpers.quick_tiers import quick_tiers
from tests.soaks.differential import ADAPTERS
from tests.unit.models.tiny import load_tiny, save_tiny
from tests.unit.text.tiny_tokenizer import tiny_backend

KINDS = ("glm4-moe", "deepseek-v3", "glm4-moe-lite", "qwen3-next", "qwen3.5")
ZERO_CENTRED = ("qwen3-next", "qwen3.5")
VOCAB, PAGE = 300, 8


def saved(folder: Path, kind: str, **changes: Any) -> PreTrainedModel:
    """A tiny checkpoint, with its tokenizer. Some configs count prediction layers."""
    if kind in ("glm4-moe", "deepseek-v3"):
        changes = {"num_mtp_layers": 1, **changes}
    model = save_tiny(folder, kind, vocab_size=VOCAB, **changes)
    tiny_backend().save(str(folder / "tokenizer.json"))
    return model


def started(folder: Path, num_guesses: int = 0, **settings: Any) -> LLM:
    """`num_guesses`: 0 for an engine without drafts."""
    config = {"method": "mtp", "num_speculative_tokens": num_guesses, "adaptive": False}
    sizes = {"max_num_batched_tokens": 64, "kv_cache_memory_bytes": 32 << 20}
    return LLM(
        str(folder), dtype="float32", block_size=PAGE, max_model_len=160, max_num_seqs=6,
        speculative_config=config if num_guesses else None, **{**sizes, **settings},
    )  # fmt: skip


def prompt_of(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, VOCAB) for _ in range(length)]


class Reference:
    """The layer in plain torch: the formula, around transformers' own decoder layer."""

    def __init__(self, folder: Path, kind: str, own: dict[str, Tensor]) -> None:
        tensors = load_file(folder / "model.safetensors")
        self._model = self._loaded(folder, kind, tensors)
        layers = enumerate(self._layers(self._model))
        like = max(number for number, layer in layers if hasattr(layer, "self_attn"))
        prefix = f"model.layers.{like}."
        changed = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
        for name, tensor in own.items():
            if name.startswith("layers.0."):
                changed[prefix + name.removeprefix("layers.0.")] = tensor
        self._layer = self._layers(self._loaded(folder, kind, changed))[like]
        self._own, self._offset = own, 1.0 if kind in ZERO_CENTRED else 0.0
        self._eps = self._model.config.rms_norm_eps

    @staticmethod
    def _layers(model: Any) -> Any:
        return model.model.layers

    @staticmethod
    def _loaded(folder: Path, kind: str, tensors: dict[str, Tensor]) -> Any:
        other = folder / "changed"
        other.mkdir(exist_ok=True)
        (other / "config.json").write_bytes((folder / "config.json").read_bytes())
        save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(other, attn_implementation="eager").eval()

    def _normed(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._eps)
        return x * scale * (self._own[f"{name}.weight"] + self._offset)

    @torch.no_grad()
    def predicted(self, tokens: list[int], count: int) -> tuple[list[int], Tensor]:
        """Guesses after these tokens, and the logits of the first."""
        model, ids = self._model, torch.tensor([tokens])
        hidden = model.model(ids).last_hidden_state[0]
        before = torch.cat((torch.zeros_like(hidden[:1]), hidden[:-1]))
        guessed: list[int] = []
        first = None
        for _ in range(count):
            embedded = model.model.embed_tokens(torch.tensor(tokens))
            both = (
                self._normed(embedded, "pre_fc_norm_embedding"),
                self._normed(before, "pre_fc_norm_hidden"),
            )
            x = (torch.cat(both, dim=-1) @ self._own["fc.weight"].T)[None]
            positions = torch.arange(len(tokens))[None]
            mask = torch.full((1, 1, len(tokens), len(tokens)), float("-inf")).triu(1)
            angles = model.model.rotary_emb(x, positions)
            out = self._layer(
                x, attention_mask=mask, position_ids=positions, position_embeddings=angles
            )
            out = self._normed((out[0] if isinstance(out, tuple) else out)[0, -1:], "norm")
            logits = model.lm_head(out)[0]
            first = logits if first is None else first
            guessed.append(int(logits.argmax()))
            tokens, before = [*tokens, guessed[-1]], torch.cat((before, out))
        assert first is not None
        return guessed, first


class Recorded:
    """What the engine's prediction layer gives: logits of one row, guess by guess."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hidden: list[Tensor] = []
        whole = Decoder.predict

        def predict(decoder: Decoder, *given: Any, **named: Any) -> Tensor | None:
            states = whole(decoder, *given, **named)
            if states is not None:
                assert len(states) == 1, "one request at a time"
                self.hidden.append(decoder.logits(states, None)[0].clone())
            return states

        monkeypatch.setattr(Decoder, "predict", predict)


@pytest.mark.parametrize("kind", KINDS)
def test_v07_the_layer_predicts_as_its_formula_says(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V07: after prompts in one piece, in chunks, and with cached pages, guesses have the logits of
    the formula. So entries of cached pages are those of a prompt that is computed whole."""
    saved(tmp_path, kind)
    own = add_prediction(tmp_path)
    reference = Reference(tmp_path, kind, own)
    rng = random.Random(4)
    prompts = [prompt_of(rng, length) for length in (1, PAGE - 1, 21)]
    prompts.append(prompts[-1][: 2 * PAGE] + prompt_of(rng, 6))
    recorded = Recorded(monkeypatch)
    for chunk in (64, 7):
        with_drafts = started(tmp_path, 2, max_num_batched_tokens=chunk)
        for prompt in (*prompts, *prompts):
            recorded.hidden.clear()
            sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
            [answer] = with_drafts.generate([prompt], sampling)
            tokens = [*prompt, *answer.outputs[0].token_ids]
            guessed, first = reference.predicted(tokens, 2)
            assert len(recorded.hidden) == 2
            torch.testing.assert_close(recorded.hidden[0], first, atol=2e-4, rtol=2e-4)
            if len(prompt) % PAGE < PAGE - 1:  # otherwise the second guess has no page
                assert [int(logits.argmax()) for logits in recorded.hidden] == guessed
        assert with_drafts.stats().total_hit_tokens > 0
        with_drafts.close()


class Engines:
    """One without drafts and one whose prediction layer is often right, with adapters."""

    def __init__(self, folder: Path, kind: str) -> None:
        saved(folder / "model", kind)
        add_prediction(folder / "model", is_right=True)
        decoder = load_tiny(folder / "model")
        self.adapters: list[LoRARequest | None] = [None, None]
        for number, (name, recipe) in enumerate(ADAPTERS.items(), 1):
            write_adapter(folder / name, decoder.adapter_targets(), recipe)
            self.adapters.append(LoRARequest(name, number, str(folder / name)))
        lora = {"enable_lora": True, "max_loras": 4}
        self.plain = started(folder / "model", **lora)
        self.drafting = started(folder / "model", 3, **lora)

    def close(self) -> None:
        self.plain.close()
        self.drafting.close()


@pytest.fixture(params=("glm4-moe", "deepseek-v3", "qwen3-next"))
def engines(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engines]:
    made = Engines(tmp_path, request.param)
    yield made
    made.close()


def sampling(**asked: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 18, "seed": 5, **asked})


SAMPLED = (
    sampling(ignore_eos=True),
    sampling(temperature=1.0, top_p=0.9, ignore_eos=True, logprobs=2),
    sampling(repetition_penalty=1.2, frequency_penalty=0.4),
    sampling(structured_outputs=StructuredOutputsParams(regex="[a-f]{3,9}(stop)?")),
    sampling(stop_token_ids=list(range(20, 120)), min_tokens=9),
    sampling(ignore_eos=True, prompt_logprobs=1),
)


def asked(engines: Engines, seed: int) -> list[Any]:
    rng = random.Random(seed)
    shared = prompt_of(rng, 2 * PAGE)
    prompts = [shared[: rng.randint(1, 16)] + prompt_of(rng, rng.randint(1, 9)) for _ in range(10)]
    return [
        (prompt, SAMPLED[place % len(SAMPLED)], engines.adapters[place % len(engines.adapters)])
        for place, prompt in enumerate(prompts)
    ]


def answered(llm: LLM, requests: list[Any]) -> list[Any]:
    prompts, samplings, adapters = zip(*requests, strict=True)
    answers = llm.generate(list(prompts), list(samplings), lora_request=list(adapters))
    return [(one.outputs[0].token_ids, one.outputs[0].finish_reason) for one in answers]


def test_v07_answers_are_the_same_with_predicted_drafts(engines: Engines) -> None:
    """V07, V01: base and adapters in one batch, greedy, drawn, penalised and with a grammar; cold
    and with cached prefixes. Right guesses save steps."""
    requests = asked(engines, seed=1)
    wanted = answered(engines.plain, requests)
    assert answered(engines.drafting, requests) == wanted
    told = engines.drafting.stats()
    assert told.total_steps < engines.plain.stats().total_steps
    assert answered(engines.drafting, requests) == wanted
    told = engines.drafting.stats()
    assert told.speculation is not None
    assert told.speculation.total_accepted_tokens > 30
    assert told.num_held_pages == 0


@pytest.mark.parametrize("kind", ["glm4-moe", "qwen3-next"])
def test_v07_answers_survive_retraction_and_tiers(kind: str, tmp_path: Path) -> None:
    """V07, V03, V04: with too few pages on the device, requests are retracted, and prefixes return
    from the host with the layer's entries."""
    saved(tmp_path, kind)
    add_prediction(tmp_path, is_right=True)
    rng = random.Random(9)
    prompts = [prompt_of(rng, rng.randint(10, 40)) for _ in range(6)]
    greedy = sampling(max_tokens=24, ignore_eos=True)
    plain = started(tmp_path)
    wanted = [one.outputs[0].token_ids for one in plain.generate(prompts, greedy)]
    plain.close()
    with quick_tiers():
        drafting = started(tmp_path, 2, num_gpu_blocks_override=22, num_host_pages=80)
        for _ in range(2):
            got = [one.outputs[0].token_ids for one in drafting.generate(prompts, greedy)]
            assert got == wanted
        told = drafting.stats()
        drafting.close()
    assert told.total_retractions > 0
    assert told.total_host_hit_tokens > 0
    assert told.speculation is not None
    assert told.speculation.total_accepted_tokens > 30


def test_v07_guesses_start_and_stop_with_their_gain(tmp_path: Path) -> None:
    """V07: a layer that is always wrong soon drafts nothing, and some steps still guess."""
    saved(tmp_path, "glm4-moe")
    add_prediction(tmp_path)
    config = {"method": "mtp", "num_speculative_tokens": 2}
    llm = LLM(
        str(tmp_path), dtype="float32", block_size=PAGE, max_model_len=160, max_num_seqs=2,
        kv_cache_memory_bytes=8 << 20, speculative_config=config,
    )  # fmt: skip
    greedy = sampling(max_tokens=120, ignore_eos=True)
    llm.generate([prompt_of(random.Random(2), 9)], greedy)
    first = llm.stats().speculation
    llm.generate([prompt_of(random.Random(3), 9)], greedy)
    told = llm.stats().speculation
    llm.close()
    assert first is not None
    assert told is not None
    assert 0 < first.total_drafts < 60
    assert told.total_drafts - first.total_drafts < 30


def test_v07_what_is_not_served_is_refused_by_name(tmp_path: Path) -> None:
    """V07: models without the layer, checkpoints without its weights, and fields of other
    methods."""
    saved(tmp_path / "llama", "llama")
    with pytest.raises(ConfigError, match=r"method 'mtp'.*Choose method 'suffix'"):
        started(tmp_path / "llama", 1)
    saved(tmp_path / "zero", "glm4-moe", num_mtp_layers=0)
    with pytest.raises(ConfigError, match=r"method 'mtp'.*Choose method 'suffix'"):
        started(tmp_path / "zero", 1)
    saved(tmp_path / "index", "deepseek-v32")
    with pytest.raises(ConfigError, match=r"method 'mtp'.*Choose method 'suffix'"):
        started(tmp_path / "index", 1)
    saved(tmp_path / "none", "glm4-moe")
    with pytest.raises(ModelError, match=r"no weights for mtp.*choose method 'suffix'"):
        started(tmp_path / "none", 1)
    with pytest.raises(ConfigError, match="tensor-parallel-size"):
        started(tmp_path / "none", 1, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="prompt_lookup_min; this is not served"):
        parse_speculation('{"method": "mtp", "prompt_lookup_min": 2}')
    for name in ("deepseek_mtp", "glm4_moe_mtp", "qwen3_next_mtp"):
        assert parse_speculation(f'{{"method": "{name}"}}').is_predicted
