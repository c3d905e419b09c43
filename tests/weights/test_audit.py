"""The audit: silent on weights that are the files', loud on every way in which a rank's shards can differ from them."""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import PreTrainedConfig, PreTrainedModel

from expertmesh.config.errors import IntegrityError
from expertmesh.io.boxes import Piece
from expertmesh.io.safetensors_reader import WeightFiles
from expertmesh.state.model_view import ModelView
from expertmesh.state.shards import local_tensor
from expertmesh.weights import audit as audit_module
from expertmesh.weights.audit import AuditMode, AuditReport, audit_weights, write_audit
from expertmesh.weights.lazy import LazyTensor
from expertmesh.weights.load import fill
from expertmesh.weights.mapping import LoadPlan
from expertmesh.weights.meta_model import build_meta_model, materialize
from tests.support.errors import refused
from tests.support.ranks import shared_ranks
from tests.weights.tiny import FAMILIES, deepseek_v3, qwen3_moe, random_model, shard_for_test, write_fused

LAYOUTS = ((2, 2, 0), (4, 2, 0), (4, 2, 1), (4, 1, 2))
EXPERTS = "model.layers.1.mlp.experts"


def _loaded(
    config: PreTrainedConfig, source: Path, layout: tuple[int, int, int], dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    model = build_meta_model(config, dtype)
    if layout[0] > 1:
        shard_for_test(model, *layout)
    materialize(model, "cpu")
    fill(model, source)
    return model


def _audits(config: PreTrainedConfig, sources: list[Path], layout: tuple[int, int, int]) -> list[AuditReport]:
    """Full audits of each source, of the same in bf16, and a sampled one."""
    reports = []
    for source in sources:
        model = _loaded(config, source, layout)
        reports += [audit_weights(model, source, "full"), audit_weights(model, source)]
        reports += [audit_weights(_loaded(config, source, layout, torch.bfloat16), source, "full")]
    return reports


def _hashes_by_hand(model: PreTrainedModel) -> dict[str, tuple[str, ...]]:
    modules = {name: module for name, module in model.named_modules() if name.endswith(".experts")}
    return {
        name: tuple(
            hashlib.sha256(b"".join(part[e].detach().numpy().tobytes() for part in (m.gate_up_proj, m.down_proj)))
            .hexdigest()
            for e in range(m.gate_up_proj.shape[0])
        )
        for name, m in modules.items()
    }  # fmt: skip


@pytest.mark.slow_cases(r"(deepseek_v3|mixtral)", why="a second and third family")
@pytest.mark.parametrize("family", FAMILIES)
def test_loaded_weights_pass_and_hashes_depend_on_neither_layout_nor_dtype(family: str, tmp_path: Path) -> None:
    reference = random_model(FAMILIES[family]())
    reference.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    write_fused(reference, tmp_path / "fused")
    expected = _hashes_by_hand(reference)
    total = sum(tensor.nbytes for tensor in reference.state_dict().values())
    sources = [tmp_path / "sharded", tmp_path / "fused"]
    ranks = [_audits(reference.config, sources, (1, 1, 0))]
    for layout in LAYOUTS:
        ranks += shared_ranks(_audits, layout[0], reference.config, sources, layout)
    for reports in ranks:
        for report in reports:
            assert report.reads > 0
            if report.mode == "full":
                assert {experts.module: experts.sha256 for experts in report.experts} == expected
        # Buffers are whole on every rank and compared on each; all else is compared once.
        assert total <= reports[0].total_bytes <= total * 1.01


@pytest.mark.parametrize("fused", [False, True])
def test_every_expert_and_every_other_tensor_is_among_the_samples(fused: bool, tmp_path: Path) -> None:
    reference = random_model(deepseek_v3())
    source = tmp_path / "source"
    write_fused(reference, source) if fused else reference.save_pretrained(source)
    model = _loaded(reference.config, source, (1, 1, 0))
    audit_weights(model, source)
    for name, tensor in ModelView(model).tensors.items():
        per_expert = tensor.dim() == 3
        halves = 2 if name.endswith("gate_up_proj") and not fused else 1  # tensors of the files, each is sampled
        parts = [part for each in tensor.detach() for part in each.chunk(halves)] if per_expert else [tensor.detach()]
        for number, part in enumerate(parts):
            right = part.clone()
            part += 1
            with pytest.raises(IntegrityError) as caught:
                audit_weights(model, source)
            assert f"model.safetensors: tensor {name.rpartition('.')[0]}" in str(caught.value)
            assert not per_expert or f"(expert {number // halves}, parameter {name} at" in str(caught.value)
            part.copy_(right)
    audit_weights(model, source)


def test_a_full_audit_sees_a_single_element(tmp_path: Path) -> None:
    reference = random_model(qwen3_moe())
    reference.save_pretrained(tmp_path)
    model = _loaded(reference.config, tmp_path, (1, 1, 0))
    for name in (f"{EXPERTS}.down_proj", "lm_head.weight", "model.norm.weight"):
        last = model.get_parameter(name).detach().view(-1)[-1:]
        right = last.clone()
        last.copy_(-right)
        with refused("weights.loaded-wrongly", IntegrityError, naming=f"parameter {name} at"):
            audit_weights(model, tmp_path, "full")
        last.copy_(right)
    assert audit_weights(model, tmp_path, "full").bytes == sum(t.nbytes for t in reference.state_dict().values())


def _experts(model: PreTrainedModel) -> list[torch.Tensor]:
    return [local_tensor(tensor) for name, tensor in ModelView(model).tensors.items() if ".experts." in name]


def _rank_0s_experts_everywhere(model: PreTrainedModel) -> None:
    """huggingface/transformers 45662."""
    for local in _experts(model):
        dist.broadcast(local, src=0)


def _two_experts_swapped_on_rank_1(model: PreTrainedModel) -> None:
    if dist.get_rank() == 1:
        local = _experts(model)[-1]
        local[[0, 1]] = local[[1, 0]]


def _experts_never_filled(model: PreTrainedModel) -> None:
    for local in _experts(model):
        local.zero_()


def _embeddings_initialised_again(model: PreTrainedModel) -> None:
    torch.nn.init.normal_(local_tensor(model.get_parameter("model.embed_tokens.weight")))


def _a_last_bit(model: PreTrainedModel) -> None:
    for local in _experts(model):
        local.copy_(local.to(torch.float64).mul(1 + 1e-7).to(local.dtype))


def _audit_tampered(
    config: PreTrainedConfig, source: Path, tamper: Callable[[PreTrainedModel], None], mode: AuditMode
) -> str:
    model = _loaded(config, source, (2, 2, 0))
    tamper(model)
    with pytest.raises(IntegrityError) as caught:
        audit_weights(model, source, mode)
    dist.barrier()  # The group still works: nobody was left inside a collective.
    return str(caught.value)


@pytest.mark.parametrize("mode", ["sampled", "full"])
@pytest.mark.parametrize(
    ("tamper", "words"),
    [
        (_rank_0s_experts_everywhere, "experts.4.gate_proj.weight holds .* where rank 1 has .*expert 4, parameter"),
        (_two_experts_swapped_on_rank_1, r"layers\.1\.mlp\.experts\.4\.down_proj.* where rank 1 has .*expert 4"),
        (_experts_never_filled, r"where rank 0 has 0 \(expert 0, parameter model\.layers\.0"),
        (_embeddings_initialised_again, r"tensor model\.embed_tokens\.weight holds .* where rank 0 has"),
        (_a_last_bit, "where rank 0 has"),
    ],
)
def test_planted_differences_are_the_same_error_on_every_rank(
    tamper: Callable[[PreTrainedModel], None],
    words: str,
    mode: AuditMode,
    tmp_path: Path,
) -> None:
    reference = random_model(qwen3_moe())
    reference.save_pretrained(tmp_path)
    first, second = shared_ranks(_audit_tampered, 2, reference.config, tmp_path, tamper, mode)
    assert first == second
    assert re.search(words, first), first
    assert str(tmp_path / "model.safetensors") in first


def test_a_reader_that_reads_from_the_wrong_place_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = random_model(qwen3_moe())
    reference.save_pretrained(tmp_path)
    real = WeightFiles._read_run

    def early(self: WeightFiles, tensor: Any, first: int, out: torch.Tensor) -> None:
        real(self, tensor, first - 4 if tensor.name == "lm_head.weight" else first, out)

    monkeypatch.setattr(WeightFiles, "_read_run", early)
    model = _loaded(reference.config, tmp_path, (1, 1, 0))
    with refused("weights.loaded-wrongly", IntegrityError, naming="tensor lm_head.weight"):
        audit_weights(model, tmp_path)


def test_a_plan_that_takes_one_expert_for_another_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = random_model(qwen3_moe())
    reference.save_pretrained(tmp_path)
    model = _loaded(reference.config, tmp_path, (1, 1, 0))
    real = audit_module.plan_load

    def swapped(model: PreTrainedModel, files: WeightFiles) -> LoadPlan:
        plan = real(model, files)
        whole = plan.tensors[f"{EXPERTS}.down_proj"]
        first, second, *rest = whole.pieces
        crossed = [
            Piece(first.dest, second.leaf, second.source, first.dims),
            Piece(second.dest, first.leaf, first.source, second.dims),
        ]
        plan.tensors[f"{EXPERTS}.down_proj"] = LazyTensor(whole.shape, whole.dtype, [*crossed, *rest])
        return plan

    monkeypatch.setattr(audit_module, "plan_load", swapped)
    with refused("weights.loaded-wrongly", IntegrityError, naming="experts.0.down_proj.weight was taken for expert 1"):
        audit_weights(model, tmp_path)


def test_a_full_audit_is_written_as_documented(tmp_path: Path) -> None:
    reference = random_model(qwen3_moe(), dtype=torch.bfloat16)
    reference.save_pretrained(tmp_path / "source")
    report = audit_weights(_loaded(reference.config, tmp_path / "source", (1, 1, 0)), tmp_path / "source", "full")
    write_audit(tmp_path / "audit.json", report, tmp_path / "source")
    content = json.loads((tmp_path / "audit.json").read_text())
    assert {name: content[name] for name in ("format", "version", "source", "bytes_compared")} == {
        "format": "expertmesh-audit",
        "version": 1,
        "source": str(tmp_path / "source"),
        "bytes_compared": sum(2 * tensor.nbytes for tensor in reference.state_dict().values()),
    }
    assert [experts["module"] for experts in content["experts"]] == ["model.layers.0.mlp.experts", EXPERTS]
    assert content["experts"][1]["slices"] == [
        {"name": "gate_up_proj", "dtype": "bfloat16", "shape": [48, 32]},
        {"name": "down_proj", "dtype": "bfloat16", "shape": [32, 24]},
    ]
    module = reference.get_submodule(EXPERTS)
    slices = [module.gate_up_proj[3], module.down_proj[3]]
    by_hand = hashlib.sha256(b"".join(part.detach().view(torch.int16).numpy().tobytes() for part in slices))
    assert content["experts"][1]["sha256"][3] == by_hand.hexdigest()
