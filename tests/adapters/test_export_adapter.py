"""A LoRA run's checkpoint, exported, verified and merged without its base in memory; and adapters by expert."""

import errno
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import expertmesh as em
from expertmesh.cli.main import main
from expertmesh.config.errors import IntegrityError
from expertmesh.export.checkpoint import export
from expertmesh.export.merge import merge
from expertmesh.training.run import train
from expertmesh.verification.checkpoint import verify
from tests.adapters.stock import adapted, base_model, logits, write_family
from tests.checkpoint.damage import flip_a_bit, remove
from tests.support.errors import refused
from tests.support.ranks import shared_ranks
from tests.training.tiny_run import run_config, write_inputs

ADAPTER = "adapter_model.safetensors"
FP32 = em.PrecisionConfig(params="float32", compute="float32", reduce="float32")
LORA = ["lora={r: 4, alpha: 8, expert_r: 2, targets: [attention, experts, router]}", "train.max_steps=2"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps on two ranks with a checkpoint after each, and the adapter at the end."""
    root = tmp_path_factory.mktemp("run")
    config = run_config(write_inputs(root / "inputs"), root / "run", *LORA, "parallel.ep=2", "checkpoint.every_steps=1")
    shared_ranks(train, 2, config)
    return root / "run"


def _load_and_write(root: Path) -> None:
    mesh = em.init_mesh(em.ParallelConfig(ep=2), num_experts=8)
    lora = em.LoraConfig(from_adapter=str(root / "adapter"))
    model = em.load_model(root / "base", mesh, precision=FP32, lora=lora)
    em.save_checkpoint(model, None, root / "checkpoints", step=1)


def _checkpoint_of(family: str, root: Path, **config: Any) -> tuple[Path, torch.Tensor]:
    """A checkpoint of stock PEFT's adapter, and the logits of its model."""
    expected = write_family(family, root, **config)
    shared_ranks(_load_and_write, 2, root)
    return root / "checkpoints" / "step-00000001", expected


def _same_files(one: Path, other: Path) -> None:
    names = [
        sorted(p.relative_to(root).as_posix() for p in root.rglob("*.*") if p.name != "README.md")
        for root in (one, other)
    ]
    assert names[0] == names[1]
    for name in names[0]:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def test_an_exported_checkpoint_is_what_saving_the_live_adapter_writes(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), "--output", str(tmp_path / "out")]) == 0
    assert "the adapter after step 2" in capsys.readouterr().out
    assert ADAPTER in {path.name for path in (tmp_path / "out").iterdir()}
    _same_files(run / "adapter", tmp_path / "out")
    export(run / "checkpoints" / "step-00000001", tmp_path / "first", dtype=torch.bfloat16)
    first, last = load_file(tmp_path / "first" / ADAPTER), load_file(tmp_path / "out" / ADAPTER)
    assert {tensor.dtype for tensor in first.values()} == {torch.bfloat16}
    assert any(not torch.equal(first[name], last[name].bfloat16()) for name in first)


def test_a_run_or_checkpoint_is_merged_as_its_adapter_is(run: Path, tmp_path: Path) -> None:
    merge(run / "adapter", tmp_path / "adapter")
    for number, path in enumerate((run, run / "checkpoints", run / "checkpoints" / "step-00000002")):
        assert main(["merge", str(path), "--output", str(tmp_path / str(number))]) == 0
        _same_files(tmp_path / "adapter", tmp_path / str(number))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "adapter"]
    assert main(["merge", str(tmp_path), "--output", str(tmp_path / "3")]) == 2


def test_where_nothing_can_be_written_is_said_in_one_sentence(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "here"))

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    assert main(["merge", str(run / "checkpoints"), "--output", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'here'}: cannot be written: Permission denied\n"


def test_verify_looks_at_every_expert_s_adapter(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "checkpoints" / "step-00000002"
    found = verify(path)
    assert not found.findings
    assert found.experts_left_out is None
    files = load_file(run / "adapter" / ADAPTER)
    for experts in found.experts:
        prefix = f"base_model.model.{experts.module}"
        pairs = [(f"{prefix}.base_layer", 32, 32), (prefix, 16, 32)]
        for expert in range(8):
            a = [files[f"{name}.lora_A.weight"].view(8, 2, -1)[expert] for name, _, _ in pairs]
            b = [files[f"{name}.lora_B.weight"].view(32, 2, 8)[..., expert] for name, _, _ in pairs]
            norm = torch.cat([each.flatten() for each in a + b]).double().norm()
            assert experts.norm[expert] == pytest.approx(float(norm))
            filled = sum(int(each.count_nonzero()) for each in b) / sum(each.numel() for each in b)
            assert experts.filled is not None
            assert experts.filled[expert] == filled
    assert main(["verify", str(run), "--json", str(tmp_path / "report.json")]) == 0
    told = capsys.readouterr().out
    assert "layer 1     8 experts' adapters, 8 different, norm " in told
    assert "; B all zero in 0, else " in told
    assert json.loads((tmp_path / "report.json").read_text())["experts"][0]["filled"] == list(
        found.experts[0].filled or ()
    )


def test_verify_tells_experts_whose_b_is_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_family("qwen3_moe", tmp_path)
    path = tmp_path / "adapter" / ADAPTER
    tensors = load_file(path)
    for outside in (".base_layer", ""):
        b = tensors[f"base_model.model.model.layers.1.mlp.experts{outside}.lora_B.weight"].view(32, 4, 8)
        b[..., 2], b[:16, :, 5] = 0, 0
    save_file(tensors, path, metadata={"format": "pt"})
    shared_ranks(_load_and_write, 2, tmp_path)
    found = verify(tmp_path / "checkpoints" / "step-00000001")
    assert found.experts[0].filled == (1.0,) * 8
    assert found.experts[1].filled == (1.0, 1.0, 0.0, 1.0, 1.0, 0.5, 1.0, 1.0)
    assert main(["verify", str(tmp_path / "checkpoints")]) == 0
    assert "; B all zero in 1, else 50% to 100% not zero" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["adapter_config.json", "expertmesh.json"])
def test_verify_finds_a_damaged_or_missing_note_on_the_adapter(run: Path, tmp_path: Path, name: str) -> None:
    for number, damage in enumerate((flip_a_bit(f"adapter/{name}", 0.5), remove(f"adapter/{name}"))):
        path = shutil.copytree(run / "checkpoints" / "step-00000002", tmp_path / str(number))
        damage(path)
        found = verify(path)
        assert any(name in finding.text for finding in found.findings)
        assert found.experts_left_out == f"adapter/{name} is damaged"


@pytest.mark.slow_cases(r"(mixtral|qwen3_moe)", why="one family stays")
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_stock_peft_reads_keys_for_each_expert_as_well(family: str, tmp_path: Path) -> None:
    """PEFT turns adapters of the separate matrices that transformers 4 had into those of fused ones."""
    path, expected = _checkpoint_of(family, tmp_path)
    arguments = ["export", str(path), "--output", str(tmp_path / "out"), "--adapter-format", "per-expert"]
    assert main(arguments) == 0
    files = load_file(tmp_path / "out" / ADAPTER)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    got = logits(peft.PeftModel.from_pretrained(base, str(tmp_path / "out")))
    assert float((got - expected).abs().max() / expected.abs().max()) <= 1e-5
    stored = {name.removesuffix(".weight") for name in load_file(tmp_path / "base" / "model.safetensors")}
    assert {name.removeprefix("base_model.model.")[: -len(".lora_A.weight")] for name in files} <= stored
    gate, up = {"mixtral": ("w1", "w3")}.get(family, ("gate_proj", "up_proj"))
    merge(tmp_path / "out", tmp_path / "merged")
    assert _error(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), expected) <= 1e-5
    shared_ranks(_continue_and_save, 2, tmp_path)
    assert _error(peft.PeftModel.from_pretrained(base_model(family), str(tmp_path / "continued")), expected) <= 1e-5
    of_gate = [name for name in files if f".experts.5.{gate}.lora_A" in name]
    assert of_gate
    for name in of_gate:
        assert torch.equal(files[name], files[name.replace(gate, up)])
        assert files[name.replace("lora_A", "lora_B")].shape == (16, 4)


@pytest.mark.parametrize(
    ("family", "config"),
    [
        (
            "mixtral",
            {
                "rank_pattern": {"q_proj": 3, r"layers\.0\..*gate_up_proj": 6, "down_proj": 2, "gate.weight": 1},
                "alpha_pattern": {r"layers\.1\..*gate_up_proj": 5, r"layers\.1\..*down_proj": 3},
            },
        ),
        ("deepseek_v3", {"use_rslora": True, "rank_pattern": {"experts.down_proj": 2, "up_proj.weight": 3}}),
    ],
    ids=["mixtral", "deepseek_v3"],
)
def test_ranks_and_scalings_by_pattern_are_those_of_single_experts(
    family: str, config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, expected = _checkpoint_of(family, tmp_path, **config)
    assert main(["export", str(path), "--output", str(tmp_path / "out"), "--adapter-format", "per-expert"]) == 0
    told = capsys.readouterr().out
    assert "serving    not read as it is by vLLM, SGLang: rank_pattern" in told
    assert "keys for each expert" not in told
    assert _error(peft.PeftModel.from_pretrained(base_model(family), str(tmp_path / "out")), expected) <= 1e-5
    merge(tmp_path / "out", tmp_path / "merged")
    assert _error(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), expected) <= 1e-5
    shared_ranks(_continue_and_save, 2, tmp_path)
    assert _error(peft.PeftModel.from_pretrained(base_model(family), str(tmp_path / "continued")), expected) <= 1e-5
    up = "w3" if family == "mixtral" else "up_proj"
    widths = {t.shape[1] for name, t in load_file(tmp_path / "out" / ADAPTER).items() if f".5.{up}.lora_B" in name}
    assert widths == ({4, 6} if family == "mixtral" else {4})


def _error(model: object, expected: torch.Tensor) -> float:
    return float((logits(model) - expected).abs().max() / expected.abs().max())


def _continue_and_save(root: Path) -> None:
    mesh = em.init_mesh(em.ParallelConfig(ep=2), num_experts=8)
    lora = em.LoraConfig(from_adapter=str(root / "out"))
    em.save_adapter(em.load_model(root / "base", mesh, precision=FP32, lora=lora), root / "continued")


def test_what_keys_for_each_expert_leave_out_is_noticed(tmp_path: Path) -> None:
    path, expected = _checkpoint_of("qwen3_moe", tmp_path)
    export(path, tmp_path / "out", adapter_format="per-expert")
    (tmp_path / "out" / "expertmesh.json").unlink()
    tensors = load_file(tmp_path / "out" / ADAPTER)
    prefix = "base_model.model.model.layers.1.mlp.experts."
    b = [f"{prefix}{expert}.up_proj.lora_B.weight" for expert in (4, 5)]
    save_file({**tensors, b[0]: tensors[b[1]], b[1]: tensors[b[0]]}, tmp_path / "out" / ADAPTER)
    merge(tmp_path / "out", tmp_path / "swapped")
    assert _error(AutoModelForCausalLM.from_pretrained(tmp_path / "swapped"), expected) > 1e-3
    save_file({name: tensor for name, tensor in tensors.items() if name != b[0]}, tmp_path / "out" / ADAPTER)
    with refused("adapter.differs-from-its-config", IntegrityError, naming=b[0]):
        merge(tmp_path / "out", tmp_path / "refused")
    save_file({**tensors, f"{prefix}8.up_proj.lora_B.weight": tensors[b[0]].clone()}, tmp_path / "out" / ADAPTER)
    with refused("adapter.differs-from-its-config", IntegrityError, naming="experts.8.up_proj"):
        merge(tmp_path / "out", tmp_path / "refused")


def test_keys_for_each_expert_are_merged_with_what_stands_beside_them(tmp_path: Path) -> None:
    path, _ = _checkpoint_of("qwen3_moe", tmp_path)
    export(path, tmp_path / "out", adapter_format="per-expert")
    (tmp_path / "out" / "expertmesh.json").unlink()
    config, prefix = tmp_path / "out" / "adapter_config.json", "base_model.model"
    said = json.loads(config.read_text())
    said["target_modules"].append("embed_tokens")
    config.write_text(json.dumps({**said, "modules_to_save": ["lm_head"]}))
    shapes = {"lm_head.weight": (96, 32), "model.embed_tokens.lora_embedding_A": (4, 96)}
    shapes["model.embed_tokens.lora_embedding_B"] = (32, 4)
    torch.manual_seed(8)
    beside = {f"{prefix}.{name}": torch.randn(shape) for name, shape in shapes.items()}
    save_file({**load_file(tmp_path / "out" / ADAPTER), **beside}, tmp_path / "out" / ADAPTER)
    expected = logits(peft.PeftModel.from_pretrained(base_model("qwen3_moe"), str(tmp_path / "out")))
    merge(tmp_path / "out", tmp_path / "merged")
    assert _error(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), expected) <= 1e-5


def test_shared_experts_alone_are_not_taken_for_routed_ones(tmp_path: Path) -> None:
    base = base_model("deepseek_v3")
    base.save_pretrained(tmp_path / "base")
    expected = adapted(base, ["o_proj"], ["shared_experts.up_proj.weight"], tmp_path / "adapter")
    shared_ranks(_load_and_write, 2, tmp_path)
    export(tmp_path / "checkpoints" / "step-00000001", tmp_path / "out", adapter_format="per-expert")
    got = logits(peft.PeftModel.from_pretrained(base, str(tmp_path / "out")))
    assert float((got - expected).abs().max() / expected.abs().max()) <= 1e-5


def test_models_without_names_for_each_expert_are_refused(tmp_path: Path) -> None:
    """GPT-OSS: all experts in one tensor, transposed, gate and up interleaved."""
    path, _ = _checkpoint_of("gpt_oss", tmp_path)
    with refused("adapter.no-per-expert-names", naming="experts.gate_up_proj"):
        export(path, tmp_path / "out", adapter_format="per-expert")
    export(path, tmp_path / "out")
    one, other = (load_file(tmp_path / name / ADAPTER) for name in ("adapter", "out"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_format_for_adapters_is_refused_for_a_whole_model(tmp_path: Path) -> None:
    shared_ranks(_write_whole, 1, tmp_path)
    with refused("checkpoint.no-adapter"):
        export(tmp_path / "step-00000001", tmp_path / "out", adapter_format="peft")


def _write_whole(root: Path) -> None:
    model = base_model("qwen3_moe")
    em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=1)))
    em.save_checkpoint(model, None, root, step=1)


def test_codes_are_refused_for_an_adapter(run: Path, tmp_path: Path) -> None:
    with refused("weights.format-unsuited", naming="int4"):
        export(run / "checkpoints" / "step-00000001", tmp_path / "out", dtype="int4")


def _continue_from(root: Path) -> None:
    mesh = em.init_mesh(em.ParallelConfig(ep=2), num_experts=8)
    lora = em.LoraConfig(from_adapter=str(root / "out"))
    model = em.load_model(root / "base", mesh, precision=FP32, lora=lora)
    em.save_adapter(model, root / "again")
    for name in ("again", "out"):
        em.load_weights(model, root / name)
    em.save_adapter(model, root / "last")
    for name in ("again", "out"):
        scaled = root / f"{name}-scaled"
        if dist.get_rank() == 0:
            path = shutil.copytree(root / name, scaled) / "adapter_config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | {"alpha_pattern": {r".*experts.*": 160}}))
        dist.barrier()
        with refused("adapter.differs-from-its-config", IntegrityError, naming="experts.gate_up_proj by"):
            em.load_weights(model, scaled)


def test_keys_for_each_expert_are_continued_and_loaded_under_either_name(tmp_path: Path) -> None:
    path, _ = _checkpoint_of("qwen3_moe", tmp_path)
    export(path, tmp_path / "out", adapter_format="per-expert")
    shared_ranks(_continue_from, 2, tmp_path)
    _same_files(tmp_path / "again", tmp_path / "last")
