"""Adapters on mixtures of experts equal dense models with the adapters merged, and PEFT's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from manyroots.ids import AdapterSlot
from manyroots.kernels.fused_moe import torch_ops
from manyroots.kernels.tolerances import assert_close
from manyroots.lora.targets import Side, Target, TargetKind
from manyroots.models.decoder import Decoder
from manyroots.scheduler.request import invoked_at
from tests.helpers.adapter_folders import ExpertFormat, Recipe, write_adapter
from tests.unit.models.merged import merged
from tests.unit.models.paged import PagedModel
from tests.unit.models.peft_models import make_pair, pool_for, read
from tests.unit.models.test_peft_parity import prompt
from tests.unit.models.test_peft_parity import run as run_with_peft
from tests.unit.models.tiny import load_tiny, save_tiny, tiny_spec

KINDS = ["qwen3-moe", "qwen3-moe-mixed"]
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERTS = ("gate_proj", "up_proj", "down_proj")
INVOCATION = (7, 8)
INTERMEDIATE = 20
"""Gate and up together are not as wide as the model, so that PEFT's flat format has one reading."""

RECIPES = {
    **{
        form.value: Recipe(rank=2 + index, experts=form, modules=ATTENTION + EXPERTS, seed=index)
        for index, form in enumerate(ExpertFormat)
    },
    "down-alone": Recipe(rank=16, alpha=6, modules=("down_proj",), seed=20),
    "attention-alone": Recipe(rank=3, modules=ATTENTION, seed=21),
    "shared, all modules": Recipe(
        rank=5, experts=ExpertFormat.SHARED_OUTER, is_rank_stabilised=True, alpha=2, seed=22
    ),
    "gate alone, shared": Recipe(
        rank=8, experts=ExpertFormat.SHARED_OUTER, modules=("gate_proj",), seed=23
    ),
}


class Served:
    """Our model with adapters in slots, all through files, and the dense models they must equal."""

    def __init__(self, folder: Path, kind: str, recipes: dict[str, Recipe]) -> None:
        base: Any = save_tiny(folder / "base", kind, moe_intermediate_size=INTERMEDIATE)
        self.ours: Decoder = load_tiny(folder / "base")
        self.pool = pool_for(self.ours, num_slots=len(recipes))
        self.slot_of: dict[str | None, int] = {}
        self.dense: dict[str | None, Any] = {None: base}
        for slot, (name, recipe) in enumerate(recipes.items()):
            pairs = write_adapter(folder / name, self.ours.adapter_targets(), recipe)
            self.pool.load(AdapterSlot(slot), read(folder / name, self.ours)[1])
            self.slot_of[name] = slot
            self.dense[name] = merged(base, pairs)

    @torch.no_grad()
    def expected(self, adapter: str | None, tokens: list[int]) -> Tensor:
        logits: Tensor = self.dense[adapter](input_ids=torch.tensor([tokens])).logits[0]
        return logits

    def run(
        self,
        requests: dict[str, tuple[str | None, list[int]]],
        chunk: int | None,
        adapter_from: dict[str, int] | None = None,
    ) -> dict[str, Tensor]:
        """All requests together, `chunk` tokens of each per step."""
        paged = PagedModel(self.ours, self.pool)
        paged.slot_of = {
            name: self.slot_of[adapter] for name, (adapter, _) in requests.items() if adapter
        }
        paged.adapter_from = adapter_from or {}
        got: dict[str, list[Tensor]] = {name: [] for name in requests}
        rest = {name: tokens for name, (_, tokens) in requests.items()}
        while rest:
            now = {name: tokens[:chunk] for name, tokens in rest.items()}
            for name, logits in paged.step(now).items():
                got[name].append(logits)
            rest = {n: left for n, tokens in rest.items() if (left := tokens[len(now[n]) :])}
        return {name: torch.cat(parts) for name, parts in got.items()}


@pytest.fixture(scope="module", params=KINDS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("served"), request.param, RECIPES)


@pytest.mark.parametrize("adapter", RECIPES)
def test_each_format_gives_the_logits_of_merged_experts_w15(served: Served, adapter: str) -> None:
    """W15, W14: gate and up before the activation, down weighted by the router; every format."""
    tokens = prompt(1, 23)
    wanted = served.expected(adapter, tokens)
    for chunk in (None, 1):
        got = served.run({"a": (adapter, tokens)}, chunk)["a"]
        assert_close("logits", got, wanted, torch.float32)
    assert (wanted - served.expected(None, tokens)).abs().max() > 0.1, "it changes something"


@pytest.mark.parametrize("chunk", [None, 1, 7])
def test_ten_adapters_and_the_base_in_one_batch_equal_each_alone_w17(
    served: Served, chunk: int | None
) -> None:
    """W17: mixed formats, ranks, scalings and base rows; prefill, chunks and decodes."""
    requests: dict[str, tuple[str | None, list[int]]] = {
        "base": (None, prompt(50, 9)), "base too": (None, prompt(51, 17))
    }  # fmt: skip
    for index, name in enumerate(RECIPES):
        requests[name] = (name, prompt(index, 5 + 3 * index))
        if index % 2:
            requests[f"{name}, again"] = (name, prompt(20 + index, 12))
    for name, logits in served.run(requests, chunk).items():
        assert_close("logits", logits, served.expected(*requests[name]), torch.float32)


@pytest.mark.parametrize("chunk", [None, 1, 4])
def test_tokens_before_an_invocation_go_through_the_bases_experts_n22(
    tmp_path: Path, chunk: int | None
) -> None:
    """N22: an activated adapter is the base model before its invocation, at the level of tokens."""
    recipe = Recipe(rank=4, modules=EXPERTS, experts=ExpertFormat.SHARED_OUTER)
    served = Served(tmp_path, "qwen3-moe", {"activated": recipe})
    start = [token for token in prompt(3, 20) if token not in INVOCATION]
    tokens = [*start, *INVOCATION, 1, 2, 3]
    invoked = invoked_at(tokens, INVOCATION)
    assert invoked == len(start)
    requests: dict[str, tuple[str | None, list[int]]] = {
        "a": ("activated", tokens), "other": (None, prompt(4, 11))
    }  # fmt: skip
    got = served.run(requests, chunk, {"a": invoked})
    base = served.expected(None, tokens)
    assert_close("logits", got["a"][:invoked], base[:invoked], torch.float32)
    assert_close("logits", got["other"], served.expected(*requests["other"]), torch.float32)
    assert (got["a"][invoked:] - base[invoked:]).abs().amax(dim=1).min() > 1e-2


def test_a_step_without_adapters_does_no_work_for_them_w18(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W18: base rows alone, while adapters are in slots, are computed as if there were none."""
    tokens = prompt(2, 11)
    without = PagedModel(served.ours).step({"a": tokens})["a"]
    monkeypatch.delattr(torch_ops, "add_to_pairs")
    monkeypatch.delattr(torch_ops, "combine")
    monkeypatch.delattr(torch_ops, "PairsByAdapter")
    assert torch.equal(served.run({"a": (None, tokens)}, None)["a"], without)
    with pytest.raises(NameError):
        served.run({"a": ("stacked", tokens)}, None)


PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
PEFT_ADAPTERS: dict[str, dict[str, Any]] = {
    f"rank {rank}": {
        "r": rank, "lora_alpha": alpha, "target_modules": list(ATTENTION[: rank % 5]),
        "target_parameters": PARAMETERS,
    }
    for rank, alpha in [(1, 2), (2, 8), (4, 4), (8, 16), (13, 3), (16, 16), (32, 32), (64, 24)]
}  # fmt: skip
PEFT_ADAPTERS["rank 4"]["use_rslora"] = True
PEFT_ADAPTERS["rank 8"]["rank_pattern"] = {"experts.down_proj": 3}


@pytest.mark.filterwarnings("ignore")
def test_eight_adapters_that_peft_saved_and_the_base_give_pefts_logits_w15_w17(
    tmp_path: Path,
) -> None:
    """W15, W17: PEFT's own `target_parameters`, as folders that PEFT wrote."""
    pair = make_pair(tmp_path, "qwen3-moe", PEFT_ADAPTERS, moe_intermediate_size=INTERMEDIATE)
    requests: dict[str, tuple[str | None, list[int]]] = {
        "base": (None, prompt(50, 9)), "base too": (None, prompt(51, 17))
    }  # fmt: skip
    for index, name in enumerate(PEFT_ADAPTERS):
        requests[name] = (name, prompt(index, 5 + 3 * index))
    for chunk in (None, 1, 7):
        run_with_peft(pair, requests, chunk)
    base = pair.expected(None, prompt(1, 9))
    for name in PEFT_ADAPTERS:
        assert (pair.expected(name, prompt(1, 9)) - base).abs().max() > 0.1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", *EXPERTS]},
        {"target_modules": list(EXPERTS), "use_rslora": True},
        {"target_modules": r".*layers\.\d+\..*(q_proj|gate_proj|up_proj|down_proj)"},
        {"target_modules": [], "target_parameters": PARAMETERS[:1]},
        {"target_modules": [], "target_parameters": PARAMETERS[1:]},
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_however_peft_is_told_to_change_experts_its_logits_are_ours_w15(
    options: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    """W15: by the names of modules, or one parameter alone; some layers may be dense."""
    adapters = {"it": {"r": 6, "lora_alpha": 9, **options}}
    pair = make_pair(tmp_path, kind, adapters, moe_intermediate_size=INTERMEDIATE)
    run_with_peft(pair, {"a": ("it", prompt(1, 19)), "b": (None, prompt(2, 8))}, chunk=None)
    base = pair.expected(None, prompt(1, 19))
    assert (pair.expected("it", prompt(1, 19)) - base).abs().max() > 0.1


@pytest.mark.parametrize("inner", [24, 48])
@pytest.mark.filterwarnings("ignore")
def test_adapters_of_gpt_oss_and_the_base_give_pefts_logits_w15_w17(
    inner: int, tmp_path: Path
) -> None:
    """W15, W17: its experts are [in, out] with gates and ups by turns, and its router a parameter,
    too; 48: down is square."""
    parameters = [*PARAMETERS, "mlp.router.weight"]
    adapters = {
        f"rank {rank}": {
            "r": rank, "lora_alpha": alpha, "target_modules": list(ATTENTION[:rank]),
            "target_parameters": parameters,
        }
        for rank, alpha in [(1, 2), (3, 6), (8, 4)]
    }  # fmt: skip
    pair = make_pair(tmp_path, "gpt-oss", adapters, intermediate_size=inner)
    requests: dict[str, tuple[str | None, list[int]]] = {"base": (None, prompt(50, 19))}
    for index, name in enumerate(adapters):
        requests[name] = (name, prompt(index, 15 + 3 * index))
    for chunk in (None, 1, 7):
        run_with_peft(pair, requests, chunk)
    base = pair.expected(None, prompt(1, 9))
    for name in adapters:
        assert (pair.expected(name, prompt(1, 9)) - base).abs().max() > 0.05


@pytest.mark.parametrize("number", range(3))
@pytest.mark.filterwarnings("ignore")
def test_one_parameter_of_gpt_oss_alone_gives_pefts_logits_w15(number: int, tmp_path: Path) -> None:
    """W15: of gates and ups, of down (whose weights alone do not say which way they are meant), of
    the router."""
    parameter = [*PARAMETERS, "mlp.router.weight"][number]
    adapters = {
        "it": {"r": 6, "lora_alpha": 9, "target_modules": [], "target_parameters": [parameter]}
    }
    pair = make_pair(tmp_path, "gpt-oss", adapters, intermediate_size=48)
    run_with_peft(pair, {"a": ("it", prompt(1, 19)), "b": (None, prompt(2, 8))}, chunk=None)
    base = pair.expected(None, prompt(1, 19))
    assert (pair.expected("it", prompt(1, 19)) - base).abs().max() > 0.05


@pytest.mark.parametrize(
    ("kind", "sparse"), [("qwen3-moe", {0, 1, 2}), ("qwen3-moe-mixed", {1, 2})]
)
def test_targets_of_experts_are_one_per_projection_of_each_sparse_layer_w14(
    kind: str, sparse: set[int]
) -> None:
    """W14: and its router; dense layers in between have the dense ones."""
    spec = tiny_spec(kind)
    model = Decoder(spec, dtype=torch.float32, device=torch.device("meta"))
    targets = model.adapter_targets()
    assert len(targets) == 3 * 7 + 2 + len(sparse)
    for layer in range(3):
        mlp, size, kind_here, count = f"model.layers.{layer}.mlp", 80, TargetKind.LINEAR, None
        if layer in sparse:
            assert targets[f"{mlp}.gate"] == Target(TargetKind.LINEAR, 48, 8)
            mlp, size, kind_here, count = f"{mlp}.experts", 24, TargetKind.EXPERTS, 8
        for name in ("gate_proj", "up_proj"):
            assert targets[f"{mlp}.{name}"] == Target(kind_here, 48, size, count, side=Side.OUTPUT)
        assert targets[f"{mlp}.down_proj"] == Target(kind_here, size, 48, count, side=Side.INPUT)
