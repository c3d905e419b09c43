"""Writes quantised copies of checkpoints as they are published, and says what their codes stand for.

Codes are made, and values decoded, by public tools (transformers, compressed-tensors) wherever these are right, so that
nothing here shares code with what is tested.
"""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssConfig, PreTrainedModel
from transformers.integrations import finegrained_fp8
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.families.tiny import tiny_config
from tests.weights import tiny

# Columns are multiples of 32, which 4-bit formats demand; rows of neither block that is tried.
SIZES: dict[str, Any] = {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 96, "head_dim": 16}

# The tensors of the file by name, and the values that they stand for, in fp32.
Written = tuple[dict[str, Tensor], Tensor]


@dataclass(frozen=True)
class Format:
    """`write(name, weight)` gives the file's tensors for one 2-D weight; `settings` is the `quantization_config`."""

    settings: dict[str, Any]
    write: Callable[[str, Tensor], Written]
    # In which dtype of the model the values are compared: where the format's own product is narrower than fp32.
    dtype: torch.dtype = torch.float32
    config: dict[str, Any] = field(default_factory=dict)


def quantise(source: Path, target: Path, form: Format, chosen: Callable[[str], bool]) -> Path:
    """Write `source` with the tensors that are `chosen` quantised into `target`/quantised, and with their values, in
    fp32, into `target`/values."""
    tensors: dict[str, dict[str, Tensor]] = {"quantised": {}, "values": {}}
    for name, tensor in load_file(source / "model.safetensors").items():
        written, values = form.write(name, tensor) if chosen(name) else ({name: tensor}, tensor)
        tensors["quantised"].update(written)
        tensors["values"][name] = values
    for kind, each in tensors.items():
        (target / kind).mkdir(parents=True)
        for path in source.glob("*.json"):
            shutil.copy(path, target / kind)
        contiguous = {name: tensor.contiguous() for name, tensor in each.items()}
        save_file(contiguous, target / kind / "model.safetensors", {"format": "pt"})
    path = target / "quantised/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": form.settings}))
    return target


def is_linear(name: str) -> bool:
    """The weights that published files quantise: projections, not routers, embeddings and heads."""
    return "_proj" in name and name.endswith(".weight")


def is_expert_matrix(name: str) -> bool:
    return name.endswith(("experts.gate_up_proj", "experts.down_proj"))


def gpt_oss_config() -> GptOssConfig:
    sizes = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32, "head_dim": 16}
    common = {"vocab_size": 50, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return GptOssConfig(**common, **sizes, num_key_value_heads=2, max_position_embeddings=64)


def _blocks(weight: Tensor, block: tuple[int, int], largest: float) -> tuple[Tensor, Tensor]:
    """The scale of each block, and of each element; the last blocks may be partial."""
    rows, columns = weight.shape
    grid = torch.empty(-(-rows // block[0]), -(-columns // block[1]))
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            part = weight[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            grid[i, j] = part.abs().max() / largest
    return grid, grid.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]


def fp8(block: tuple[int, int], exponents: torch.dtype | None = None, suffix: str = "weight_scale_inv") -> Format:
    def write(name: str, weight: Tensor) -> Written:
        grid, each = _blocks(weight, block, 448)
        if exponents is not None:
            grid, each = (2 ** torch.ceil(torch.log2(part)) for part in (grid, each))
        codes = (weight / each).to(torch.float8_e4m3fn)
        stored = grid if exponents is None else (torch.log2(grid) + 127).to(torch.uint8).view(exponents)
        # transformers' own, which 5.17 has for whole blocks alone.
        own = getattr(finegrained_fp8, "_dequantize_fp8_weight", lambda *_: codes.to(torch.float32) * each)
        values = own(codes, grid, list(block), torch.float32)
        return {name: codes, f"{name.removesuffix('.weight')}.{suffix}": stored}, values

    return Format({"quant_method": "fp8", "weight_block_size": list(block), "activation_scheme": "dynamic"}, write)


def fp8_scaled(form: str) -> Format:
    """e4m3 with one scale a tensor (Mistral) or a row."""

    def write(name: str, weight: Tensor) -> Written:
        largest = weight.abs().max() if form == "tensor" else weight.abs().amax(1, keepdim=True)
        scale = largest / 448
        codes = (weight / scale).to(torch.float8_e4m3fn)
        stem = name.removesuffix(".weight")
        unused = {f"{stem}.activation_scale": torch.tensor(0.5)}
        return {name: codes, f"{stem}.weight_scale_inv": scale, **unused}, codes.to(torch.float32) * scale

    return Format({"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"}, write)


_MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _e2m1(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of 4 bits, two a byte, low nibble first, and exponents with bias 127, for runs of 32 columns."""
    runs = weight.unflatten(-1, (-1, 32))
    exponents = torch.ceil(torch.log2(runs.abs().amax(-1) / 6))
    scaled = runs / 2 ** exponents[..., None]
    codes = (scaled.abs()[..., None] - _MAGNITUDES).abs().argmin(-1) + 8 * (scaled < 0)
    codes = codes.flatten(-2).to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)


def fp4_experts() -> Format:
    """DeepSeek-V4: experts of 4 bits beside linear layers of e4m3, both with e8m0 scales named `.scale`."""
    linear = fp8((16, 16), torch.float8_e8m0fnu, "scale")

    def write(name: str, weight: Tensor) -> Written:
        if ".experts." not in name:
            return linear.write(name, weight)
        packed, exponents = _e2m1(weight)
        scale = exponents.view(torch.float8_e8m0fnu)
        values = Fp8Dequantize(None)._dequantize_one(packed.view(torch.int8), scale, torch.float32)
        return {name: packed.view(torch.int8), f"{name.removesuffix('.weight')}.scale": scale}, values

    return Format(linear.settings, write)


def deepseek_v4_model() -> PreTrainedModel:
    """Of tiny sizes, with columns for blocks of 32."""
    config = tiny_config("DeepseekV4ForCausalLM", "deepseek_v4")
    config.moe_intermediate_size = 32
    return tiny.random_model(config)


def write_deepseek_v4(directory: Path) -> Path:
    """A model under the names of the published files, which transformers itself does not quite write."""
    deepseek_v4_model().save_pretrained(directory)
    path = directory / "model.safetensors"
    outside = {f"hc_head.hc_{part}": f"hc_head_{part}" for part in ("fn", "base", "scale")}
    outside["embed_tokens.weight"] = "embed.weight"
    names = ((name.removeprefix("model."), tensor) for name, tensor in load_file(path).items())
    save_file({outside.get(name, name): tensor for name, tensor in names}, path, {"format": "pt"})
    return directory


def is_deepseek_v4_matrix(name: str) -> bool:
    return bool(re.search(r"\.(experts\.\d+|shared_experts)\.w\d\.weight$|attn\.w(q_a|q_b|kv|o_a|o_b)\.weight$", name))


def gpt_oss() -> Format:
    """`X_blocks` and `X_scales`; the model's own parameters are transposed."""

    def write(name: str, weight: Tensor) -> Written:
        packed, exponents = _e2m1(weight.transpose(-1, -2))
        blocks = packed.unflatten(-1, (-1, 16)).contiguous()
        values = convert_moe_packed_tensors(blocks, exponents, dtype=torch.float32)
        return {f"{name}_blocks": blocks, f"{name}_scales": exponents}, values

    return Format({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, write)


def compressed(form: str, weights: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> Format:
    """What compressed-tensors itself compresses and decompresses."""
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, format=form)
    compressor = BaseCompressor.get_value_from_registry(form)

    def write(name: str, weight: Tensor) -> Written:
        state = {"weight": weight.to(torch.bfloat16), **_observed(weight, weights)}
        stored = compressor.compress(state, scheme)
        values = compressor.decompress(stored, scheme)["weight"]
        stem = name.removesuffix(".weight")
        return {f"{stem}.{key}": tensor for key, tensor in stored.items()}, values.to(torch.float32)

    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "format": form}}
    settings = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}
    return Format(settings, write, dtype)


def _observed(weight: Tensor, weights: dict[str, Any]) -> dict[str, Tensor]:
    """Scales, and what else a format has, as a calibration would find them."""
    if weights["strategy"] == "channel":
        return {"weight_scale": (weight.abs().amax(1, keepdim=True) / 448).to(torch.bfloat16)}
    if weights["strategy"] == "tensor":
        return {"weight_scale": (weight.abs().max() / 448).reshape(1)}
    runs = weight.unflatten(-1, (-1, weights["group_size"]))
    largest = runs.abs().amax(-1)
    if weights["type"] == "int":
        found = {"weight_scale": (largest / 7).to(torch.bfloat16), "weight_shape": torch.tensor(weight.shape)}
        if not weights["symmetric"]:
            found["weight_zero_point"] = torch.randint(-3, 3, largest.shape, dtype=torch.int8)
        return found
    if weights["group_size"] == 32:
        return {"weight_scale": 2 ** torch.ceil(torch.log2(largest / 6))}
    total = 448 * 6 / weight.abs().max()
    scales = (largest / 6 * total).to(torch.float8_e4m3fn).to(torch.float32)
    return {"weight_scale": scales, "weight_global_scale": total.reshape(1)}


def modelopt() -> Format:
    """The same codes as compressed-tensors' NVFP4, under ModelOpt's names, with the inverse of its factor."""
    inner = compressed(*NVFP4)

    def write(name: str, weight: Tensor) -> Written:
        stored, _ = inner.write(name, weight)
        stem = name.removesuffix(".weight")
        packed, scale = stored[f"{stem}.weight_packed"], stored[f"{stem}.weight_scale"]
        factor = (1 / stored[f"{stem}.weight_global_scale"]).reshape(())
        # The values of unit exponents, then the scales: in fp32, as ModelOpt defines them.
        units = torch.full((packed.shape[0], packed.shape[1] // 16), 127, dtype=torch.uint8)
        codes = Fp8Dequantize(None)._dequantize_one(packed.view(torch.int8), units, torch.float32)
        values = codes * (scale.to(torch.float32) * factor).repeat_interleave(16, 1)
        own = {name: packed, f"{stem}.weight_scale": scale, f"{stem}.weight_scale_2": factor}
        return {**own, f"{stem}.input_scale": torch.tensor(0.1)}, values

    return Format({"quant_method": "modelopt", "quant_algo": "NVFP4"}, write)


_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
_FP4 = {"num_bits": 4, "type": "float", "symmetric": True}
NVFP4: tuple[str, dict[str, Any]] = (
    "nvfp4-pack-quantized",
    {**_FP4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"},
)
FORMATS: dict[str, Callable[[], Format]] = {
    "fp8 blocks": lambda: fp8((16, 16)),
    "fp8 partial blocks": lambda: fp8((20, 12)),
    "fp8 blocks, e8m0": lambda: fp8((20, 12), torch.float8_e8m0fnu),
    "fp8 blocks, e8m0 named scale": lambda: fp8((20, 12), torch.float8_e8m0fnu, "scale"),
    "mxfp8": lambda: fp8((1, 32), torch.uint8),
    "fp8, one scale": lambda: fp8_scaled("tensor"),
    "fp8, a scale a row": lambda: fp8_scaled("row"),
    "fp4 experts": fp4_experts,
    "int4": lambda: compressed("pack-quantized", _INT4),
    "int4 with zero points": lambda: compressed("pack-quantized", {**_INT4, "symmetric": False}),
    "mxfp4": lambda: compressed("mxfp4-pack-quantized", {**_FP4, "strategy": "group", "group_size": 32}),
    "nvfp4": lambda: compressed(*NVFP4),
    "fp8 of compressed-tensors, a scale a row": lambda: compressed(
        "float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    ),
    "nvfp4 of modelopt": modelopt,
}
