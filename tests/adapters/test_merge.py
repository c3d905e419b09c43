"""A merged adapter is a plain model that computes what stock PEFT's does; another base or a damaged file is refused."""

import copy as copies
import json
import re
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

import expertmesh as em
from expertmesh.adapters.plan import plan_adapters
from expertmesh.cli.main import main
from expertmesh.config.errors import IntegrityError, SecurityError
from expertmesh.data.encoding import sandbox
from expertmesh.export import merge as merge_module
from expertmesh.export.merge import Deltas, merge, sidecar_files
from expertmesh.weights import lazy, write
from tests.adapters.reference import random_adapter
from tests.adapters.stock import EXPERTS, adapted, base_model, logits, write_family
from tests.data.tokenizers_on_the_fly import CHATML, bpe_tokenizer
from tests.support.errors import refused
from tests.support.ranks import shared_ranks

WEIGHTS, ADAPTER = "model.safetensors", "adapter_model.safetensors"
FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "llama4")
FP32 = em.PrecisionConfig(params="float32", compute="float32", reduce="float32")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, torch.Tensor]]:
    """By family: a directory with base and adapter of stock PEFT, and the logits of both together."""
    roots = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    return {family: (root, write_family(family, root)) for family, root in roots.items()}


@pytest.fixture
def copy(written: dict[str, tuple[Path, torch.Tensor]], tmp_path: Path) -> Path:
    """Qwen3's base and adapter, to spoil; nothing else is in `tmp_path`."""
    return shutil.copytree(written["qwen3_moe"][0], tmp_path / "copy")


def _plain(directory: Path) -> Any:
    """What transformers reads, with nothing missing."""
    model, notes = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(notes.values()), notes
    return model


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


def _change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_merged_model_computes_what_stock_peft_computes(
    written: dict[str, tuple[Path, torch.Tensor]], family: str, tmp_path: Path
) -> None:
    root, expected = written[family]
    report = merge(root / "adapter", tmp_path / "out")
    assert _error(logits(_plain(tmp_path / "out")), expected) <= 1e-5
    assert _error(logits(base_model(family)), expected) > 0.1
    before, after = load_file(root / "base" / WEIGHTS), load_file(tmp_path / "out" / WEIGHTS)
    assert {name: (t.shape, t.dtype) for name, t in before.items()} == {
        name: (t.shape, t.dtype) for name, t in after.items()
    }
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    experts = {name for name in before if ".experts." in name and "bias" not in name}
    assert experts <= changed
    assert not any("norm" in name or "embed" in name or "bias" in name for name in changed)
    assert report.compared.matrices == len(report.plan.targets)
    assert report.compared.experts == 2 * sum("experts.down_proj" in t.name for t in report.plan.targets) > 0
    assert not report.base_checked


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_adapters_of_others_merge_to_stock_peft_s_logits(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = base_model(family)
    base.save_pretrained(tmp_path / "base")
    said = {"rank_pattern": {"q_proj": 2, "experts.down_proj": 6}, "alpha_pattern": {"experts.down_proj": 5}}
    named = EXPERTS if family == "gpt_oss" else ()
    expected = adapted(base, "all-linear", named, tmp_path / "adapter", exclude_modules=["k_proj"], **said)
    merge(tmp_path / "adapter", tmp_path / "out", base=str(tmp_path / "base"))
    assert _error(logits(_plain(tmp_path / "out")), expected) <= 1e-5
    monkeypatch.setattr(em.LoraConfig, "scaling_of", lambda self, r, alpha: self.alpha / self.r)
    merge(tmp_path / "adapter", tmp_path / "wrong", base=str(tmp_path / "base"))
    assert _error(logits(_plain(tmp_path / "wrong")), expected) > 1e-3


def _trained_beside(base: Any, directory: Path, **config: Any) -> torch.Tensor:
    """Save an adapter of stock PEFT all of which is trained, also beside its matrices; the logits of its model."""
    modules = config.pop("target_modules", ["q_proj"])
    model = random_adapter(copies.deepcopy(base), directory, modules, EXPERTS, **config)
    torch.manual_seed(6)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not re.search("lora_[AB]", name):
            with torch.no_grad():
                parameter += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(directory)
    return logits(model)


@pytest.mark.parametrize(
    ("family", "changes", "config", "rows"),
    [
        ("deepseek_v3", {}, {"modules_to_save": ["lm_head", "embed_tokens", "mlp.gate", "input_layernorm"]}, None),
        ("qwen3_moe", {}, {"trainable_token_indices": {"embed_tokens": [9, 5, 40], "lm_head": [1]}}, [9, 5, 40]),
        ("qwen3_moe", {"tie_word_embeddings": True}, {"trainable_token_indices": [9, 5]}, [9, 5]),
        ("mixtral", {}, {"target_modules": ["q_proj", "embed_tokens"], "alpha_pattern": {"embed_tokens": 5}}, None),
    ],
    ids=["modules_to_save", "tokens", "tokens of tied embeddings", "embeddings"],
)
def test_what_was_trained_in_full_beside_an_adapter_is_merged_as_stock_peft_does(
    family: str, changes: dict[str, Any], config: dict[str, Any], rows: list[int] | None, tmp_path: Path
) -> None:
    base = base_model(family, **changes)
    base.save_pretrained(tmp_path / "base")
    expected = _trained_beside(base, tmp_path / "adapter", **config)
    arguments = [
        "merge",
        str(tmp_path / "adapter"),
        "--output",
        str(tmp_path / "out"),
        "--base",
        str(tmp_path / "base"),
    ]
    assert main(arguments) == 0
    assert _error(logits(_plain(tmp_path / "out")), expected) <= 1e-5
    theirs = peft.PeftModel.from_pretrained(copies.deepcopy(base), str(tmp_path / "adapter")).merge_and_unload()
    theirs.save_pretrained(tmp_path / "theirs")
    before, ours, theirs = (load_file(tmp_path / name / WEIGHTS) for name in ("base", "out", "theirs"))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.allclose(tensor, theirs[name], rtol=1e-5, atol=1e-6), name
    moved = (ours["model.embed_tokens.weight"] != before["model.embed_tokens.weight"]).any(1).nonzero().flatten()
    assert moved.tolist() == (list(range(96)) if rows is None else sorted(rows))
    with refused("adapter.unsupported-target" if family == "mixtral" else "adapter.unsupported-option"):
        plan_adapters(base, em.LoraConfig(from_adapter=str(tmp_path / "adapter")), None)


def test_a_module_that_peft_would_untie_is_refused_and_a_missing_one_is_noticed(tmp_path: Path) -> None:
    base = base_model("qwen3_moe", tie_word_embeddings=True)
    base.save_pretrained(tmp_path / "base")
    for config in ({"modules_to_save": ["lm_head"]}, {"trainable_token_indices": {"lm_head": [3]}}):
        _trained_beside(base, tmp_path / "adapter", **config)
        with refused("adapter.unsupported-option", naming="are one weight"):
            merge(tmp_path / "adapter", tmp_path / "out", base=str(tmp_path / "base"))
    _trained_beside(base, tmp_path / "embeddings", target_modules=["embed_tokens"])
    with refused("lora.tied-head"):
        merge(tmp_path / "embeddings", tmp_path / "out", base=str(tmp_path / "base"))
    path = tmp_path / "adapter" / "adapter_config.json"
    _change(path, modules_to_save=["norm"], trainable_token_indices=None)
    with refused("adapter.differs-from-its-config", IntegrityError, naming="q_norm.weight"):
        merge(tmp_path / "adapter", tmp_path / "out", base=str(tmp_path / "base"))


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_the_dtypes_are_the_base_s_unless_asked_for(dtype: torch.dtype | None, tmp_path: Path) -> None:
    """DeepSeek-V3 keeps a bias in fp32, since transformers 5.24 routers; merged weights are rounded once."""
    base = base_model("deepseek_v3", dtype=torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    files = load_file(tmp_path / "base" / WEIGHTS)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    files[bias] = files[bias].float() + 1e-4
    save_file(files, tmp_path / "base" / WEIGHTS, metadata={"format": "pt"})
    adapted(base, ["o_proj"], EXPERTS, tmp_path / "adapter")
    merge(tmp_path / "adapter", tmp_path / "out", base=str(tmp_path / "base"), dtype=dtype)
    after = load_file(tmp_path / "out" / WEIGHTS)
    wide = {name for name, tensor in files.items() if tensor.dtype == torch.float32}
    assert bias in wide
    assert {name for name, tensor in after.items() if tensor.dtype != (dtype or torch.bfloat16)} == (
        set() if dtype else wide
    )
    assert torch.equal(after[bias], files[bias])
    adapter = load_file(tmp_path / "adapter" / ADAPTER)
    prefix = "base_model.model.model.layers.1.mlp.experts.lora_"
    a, b = adapter[f"{prefix}A.weight"].view(8, 4, 16), adapter[f"{prefix}B.weight"].view(32, 4, 8)
    for expert in range(8):
        name = f"model.layers.1.mlp.experts.{expert}.down_proj.weight"
        exact = files[name].float() + 2.0 * b[..., expert].float() @ a[expert].float()
        assert torch.allclose(after[name].float(), exact.to(after[name].dtype).float(), rtol=2**-7, atol=1e-6)
        if dtype is not None:
            assert torch.allclose(after[name], exact, atol=1e-6)


class _Largest(TorchDispatchMode):
    """The largest memory in bytes that any operation's result lies in, apart from files that a library has mapped."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0
        self.mapped: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                memory = tensor.untyped_storage()
                if func is torch.ops.aten.set_.source_Storage:
                    self.mapped.add(memory.data_ptr())
                elif memory.data_ptr() not in self.mapped:
                    self.size = max(self.size, memory.nbytes())
        return result


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_memory_is_a_block_and_one_adapter_never_a_tensor_of_all_experts(
    written: dict[str, tuple[Path, torch.Tensor]], family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, _ = written[family]
    for module in (lazy, write, merge_module):
        monkeypatch.setattr(module, "_BLOCK_ELEMENTS", 512)
    monkeypatch.setattr(merge_module, "_SAMPLE_ELEMENTS", 64)
    with _Largest() as largest:
        merge(root / "adapter", tmp_path / "out")
    adapter = max(tensor.nbytes for tensor in load_file(root / "adapter" / ADAPTER).values())
    stack = load_file(root / "base" / WEIGHTS).get("model.layers.0.mlp.experts.gate_up_proj", torch.empty(8, 32, 32))
    assert 512 * 4 <= largest.size <= max(512 * 4, adapter) < stack.nbytes / 4
    monkeypatch.undo()
    merge(root / "adapter", tmp_path / "again")
    one, other = load_file(tmp_path / "out" / WEIGHTS), load_file(tmp_path / "again" / WEIGHTS)
    assert all(torch.allclose(one[name], other[name], rtol=1e-6, atol=1e-7) for name in one)


def _train_nothing(source: Path, precision: em.PrecisionConfig, adapter: Path, directory: Path) -> None:
    mesh = em.init_mesh(em.ParallelConfig(ep=2), num_experts=8)
    lora = em.LoraConfig(from_adapter=str(adapter))
    model = em.load_model(source, mesh, precision=precision, lora=lora)
    em.save_adapter(model, directory, tokenizer=bpe_tokenizer(CHATML))


@pytest.mark.parametrize("precision", [FP32, em.PrecisionConfig()], ids=["fp32", "bf16"])
def test_the_base_is_the_one_that_was_trained_on_or_refused(
    written: dict[str, tuple[Path, torch.Tensor]],
    precision: em.PrecisionConfig,
    tmp_path: Path,
) -> None:
    """DeepSeek-V3 has tensors that stay in fp32 when the rest is trained in bf16."""
    root, expected = written["deepseek_v3"]
    shared_ranks(_train_nothing, 2, root / "base", precision, root / "adapter", tmp_path / "adapter")
    report = merge(tmp_path / "adapter", tmp_path / "out")
    assert report.base_checked
    assert _error(logits(_plain(tmp_path / "out")), expected) <= 1e-5
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == CHATML
    other = shutil.copytree(root / "base", tmp_path / "other")
    tensors = load_file(other / WEIGHTS)
    tensors["model.layers.1.mlp.experts.5.up_proj.weight"][3, 4] *= 1.5
    save_file(tensors, other / WEIGHTS, metadata={"format": "pt"})
    with refused("adapter.other-base", IntegrityError, naming="--base"):
        merge(tmp_path / "adapter", tmp_path / "refused", base=str(other))
    assert not (tmp_path / "refused").exists()
    arguments = ["merge", str(tmp_path / "adapter"), "--output", str(tmp_path / "refused"), "--base", str(other)]
    assert main(arguments) == IntegrityError.exit_code == 3


def test_what_does_not_fit_or_is_damaged_is_an_integrity_error(copy: Path) -> None:
    path = copy / "adapter" / ADAPTER
    good = load_file(path)
    a = "base_model.model.model.layers.1.mlp.experts.base_layer.lora_A.weight"

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, path, metadata={"format": "pt"})

    wrong = "adapter.differs-from-its-config"
    for damage, cause, naming in (
        (lambda: spoil({k: v for k, v in good.items() if k != a}), wrong, a),
        (lambda: spoil({**good, "x.lora_A.weight": good[a].clone()}), wrong, "x.lora_A.weight"),
        (lambda: spoil({**good, a: good[a][:4].clone()}), wrong, "[4, 32]"),
        (lambda: spoil({**good, a: good[a] * float("nan")}), "weights.not-finite", "gate_up_proj_lora_A"),
        (lambda: path.write_bytes(path.read_bytes()[:-5]), "weights.damaged", path.name),
        (lambda: path.write_bytes(b"\x10" + path.read_bytes()[1:60]), "weights.damaged", path.name),
    ):
        damage()
        with refused(cause, IntegrityError, naming=naming):
            merge(copy / "adapter", copy / "out")
        spoil(good)
        assert sorted(each.name for each in copy.iterdir()) == ["adapter", "base"]
    merge(copy / "adapter", copy / "out")


def test_a_weight_of_another_base_beside_an_adapter_is_noticed(tmp_path: Path) -> None:
    """PEFT writes the base's weight beside the adapter of an embedding or a head, and reads it again."""
    base = base_model("qwen3_moe")
    base.save_pretrained(tmp_path / "base")
    _trained_beside(base, tmp_path / "adapter", target_modules=["embed_tokens", "lm_head"])
    merge(tmp_path / "adapter", tmp_path / "out", base=str(tmp_path / "base"))
    path, key = tmp_path / "adapter" / ADAPTER, "base_model.model.lm_head.base_layer.weight"
    tensors, bias = load_file(path), key.replace("weight", "bias")
    save_file({**tensors, bias: torch.zeros(3)}, path, metadata={"format": "pt"})
    with refused("adapter.differs-from-its-config", IntegrityError, naming=bias):
        merge(tmp_path / "adapter", tmp_path / "refused", base=str(tmp_path / "base"))
    tensors[key][3, 4] *= 1.5
    save_file(tensors, path, metadata={"format": "pt"})
    with refused("adapter.other-base", IntegrityError, naming=key):
        merge(tmp_path / "adapter", tmp_path / "refused", base=str(tmp_path / "base"))


def test_a_pickled_adapter_is_refused_for_security(copy: Path) -> None:
    (copy / "adapter" / ADAPTER).rename(copy / "adapter" / "adapter_model.bin")
    with refused("adapter.pickle", SecurityError):
        merge(copy / "adapter", copy / "out")
    assert main(["merge", str(copy / "adapter"), "--output", str(copy / "out")]) == 4


@pytest.mark.parametrize(
    ("change", "cause", "naming"),
    [
        ({"use_dora": True}, "adapter.unsupported-option", "use_dora"),
        ({"rank_pattern": {"q_proj": "2"}}, "adapter.invalid-config", "rank_pattern"),
        ({"init_lora_weights": "pissa_niter_4"}, "adapter.changes-base", "pissa_niter_4"),
        ({"base_model_name_or_path": None}, "adapter.unknown-base", "--base"),
        ({"base_model_name_or_path": "/nowhere/to/be/found"}, "model.not-found", "--base names another"),
        ({"modules_to_save": "lm_head"}, "adapter.invalid-config", "modules_to_save"),
        ({"modules_to_save": ["mlp.gate"]}, "adapter.unsupported-option", "it has an adapter too"),
        ({"trainable_token_indices": [1, 1]}, "adapter.invalid-config", "trainable_token_indices"),
        ({"trainable_token_indices": [96]}, "adapter.unsupported-option", "has 96 rows"),
        ({"trainable_token_indices": {"layers": [0]}}, "adapter.unsupported-option", "no embedding"),
        ({"peft_type": "IA3"}, "adapter.not-lora", ""),
    ],
)
def test_what_cannot_be_merged_is_refused_by_name(copy: Path, change: dict[str, Any], cause: str, naming: str) -> None:
    _change(copy / "adapter" / "adapter_config.json", **change)
    with refused(cause, naming=naming):
        merge(copy / "adapter", copy / "out")
    assert not (copy / "out").exists()


@pytest.mark.parametrize("key", ["target_modules", "exclude_modules", "rank_pattern"])
def test_patterns_that_never_end_are_refused_when_their_time_is_over(
    copy: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "TIME_LIMIT_SECONDS", 0.5)
    endless = r"(([a-z0-9_]+[.]?)+)+!"
    _change(copy / "adapter" / "adapter_config.json", **{key: {endless: 2} if key == "rank_pattern" else endless})
    with refused("adapter.slow-pattern", SecurityError, naming="does not finish within 0.5 s"):
        merge(copy / "adapter", copy / "out")
    assert not (copy / "out").exists()


def test_tied_weights_stay_tied_and_an_adapter_on_them_is_refused(tmp_path: Path) -> None:
    base = base_model("qwen3_moe", tie_word_embeddings=True)
    base.save_pretrained(tmp_path / "base")
    expected = adapted(base, ["q_proj"], EXPERTS, tmp_path / "adapter", use_rslora=True)
    merge(tmp_path / "adapter", tmp_path / "out", base=str(tmp_path / "base"))
    assert "lm_head.weight" not in load_file(tmp_path / "out" / WEIGHTS)
    assert _error(logits(_plain(tmp_path / "out")), expected) <= 1e-5
    adapted(base, ["q_proj", "lm_head"], EXPERTS, tmp_path / "head")
    with refused("lora.tied-head"):
        merge(tmp_path / "head", tmp_path / "refused", base=str(tmp_path / "base"))


def test_experts_without_any_b_are_named_and_files_follow_the_shard_size(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copy / "adapter" / ADAPTER
    tensors = load_file(path)
    b = tensors["base_model.model.model.layers.1.mlp.experts.lora_B.weight"].view(32, 4, 8)
    b[..., 2], b[..., 5] = 0, 0
    save_file(tensors, path, metadata={"format": "pt"})
    arguments = ["merge", str(copy / "adapter"), "--output", str(copy / "out"), "--max-shard-size", "40KB"]
    assert main(arguments) == 0
    told = capsys.readouterr().out
    assert "cannot be checked" in told
    line = next(line for line in told.splitlines() if "merged      model.layers.1:" in line)
    assert line.split(": ")[1] == (
        "self_attn.q_proj, self_attn.v_proj, mlp.experts.gate_up_proj of 8 experts, "
        "mlp.experts.down_proj of 8 experts, mlp.gate.weight"
    )
    unused = [line.strip() for line in told.splitlines() if "B is all zero" in line]
    assert unused == ["model.layers.1.mlp.experts.down_proj: nothing added to experts 2, 5, whose B is all zero"]
    assert "compared    a sample of 10 merged weights (4 of one expert each)" in told
    assert len(list((copy / "out").glob("model-*.safetensors"))) > 2
    _plain(copy / "out")


def test_a_merge_gone_wrong_is_noticed_and_removed(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Deltas.add

    def shifted(self: Deltas, weight: str, box: Any, values: torch.Tensor) -> None:
        if self.targets[weight].experts is not None:
            (first, last), *rest = box
            box = (((first + 1) % 8, (first + 1) % 8 + last - first), *rest)
        real(self, weight, box, values)

    monkeypatch.setattr(Deltas, "add", shifted)
    (copy / "out").symlink_to(copy / "elsewhere")
    with refused("adapter.merged-wrongly", IntegrityError, naming="expert "):
        merge(copy / "adapter", copy / "out")
    assert not (copy / "elsewhere").exists()
    monkeypatch.setattr(Deltas, "add", real)
    path, key = copy / "adapter" / ADAPTER, "base_model.model.lm_head.weight"
    save_file({**load_file(path), key: torch.ones(96, 32)}, path, metadata={"format": "pt"})
    _change(copy / "adapter" / "adapter_config.json", modules_to_save=["lm_head"])
    monkeypatch.setattr(Deltas, "replace", lambda self, weight, box, values: values)
    with refused("adapter.merged-wrongly", IntegrityError, naming=key):
        merge(copy / "adapter", copy / "out")
    assert not (copy / "out").exists()


def test_what_modelopt_says_of_its_codes_is_not_said_of_values(tmp_path: Path) -> None:
    for name in ("config.json", "hf_quant_config.json", "generation_config.json"):
        (tmp_path / name).write_text("{}")
    files = sidecar_files(tmp_path, tmp_path, code=False)
    assert set(files.files) == {"generation_config.json"}


@pytest.mark.parametrize("rows", [2880, 100])
def test_a_sample_of_codes_has_whole_blocks(rows: int) -> None:
    for weight in map(str, range(20)):
        first, last = merge_module._some_rows(weight, rows, 5760, block=128)
        assert first % 128 == 0
        assert last % 128 == 0 or last == rows
        assert last - first >= min(rows, 45)
