"""Read the config.json of a model and check it before a model is built from it.

transformers builds any size: a list of a billion layers, a vocabulary of minus five. Numbers that no model has are
refused here, with the key that holds them. The meaning of the keys, and the set of keys, is left to the family.
"""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from expertmesh.config.errors import InputError
from expertmesh.io.reading import read_json, shortened

_MAX_NUMBER = 2**63
# The largest allowed number of each kind, some tens of times that of published models.
_MOST = {
    "layers": 4096,
    "experts": 65_536,
    "heads": 65_536,
    "vocab_size": 2**27,
    "size": 2**24,
    "dim": 2**24,
    "rank": 2**24,
}
_MOST_EXPERTS_IN_ALL = 2**20
_COUNT = re.compile(rf"(?:.*_)?({'|'.join(_MOST)})")
_NEVER_ZERO = {
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "num_experts",
    "n_routed_experts",
    "num_local_experts",
    "moe_num_experts",
}
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_top_k", "moe_k")
_KINDS: dict[str, Any] = {"model_type": str, "architectures": list, "text_config": dict, "quantization_config": dict}
_POSITIVE = {"rope_theta", "theta", "rms_norm_eps", "layer_norm_eps", "initializer_range"}
# The limits of a time step in Mamba are infinite on purpose.
_MAY_BE_INFINITE = {"time_step_limit"}


def read_model_json(path: Path) -> dict[str, Any]:
    """Return the content of a config.json.

    Raises:
        InputError: It is not a JSON object, or has a number that no model has.
    """
    try:
        content = read_json(path)
    except FileNotFoundError as error:
        raise InputError(
            f"{path}: there is no such file; give the directory of a model", key="model.invalid-config"
        ) from error
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as a model's config: {error}", key="model.invalid-config") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: is not a JSON object", key="model.invalid-config")
    if "configuration_files" in content:
        raise InputError(
            f"{path}: configuration_files names other files, which transformers would read in place of this one; "
            "remove it, and put the wanted one here",
            key="model.invalid-config",
        )
    for key, kind in _KINDS.items():
        if not isinstance(value := content.get(key), kind | None):
            problem = f"{path}: {key} is {shortened(repr(value))}, which has another type; correct it"
            raise InputError(problem, key="model.invalid-config")
    refuse_impossible(content, path)
    return content


def refuse_impossible(content: Mapping[str, Any], path: Path) -> None:
    """Raise `InputError` for the first number in `content` that no model has."""
    for where, problem in _impossible(content, ""):
        raise InputError(f"{path}: {shortened(where)} {problem}; correct it", key="model.invalid-config")


def blamed(content: Mapping[str, Any], reason: str, prefix: str = "") -> str | None:
    """Find the value of a config.json that an error of transformers is about.

    It is a value that `reason` quotes, or a padding token without an embedding.

    Returns:
        `key is value` as text, or None if the error is about neither.
    """
    for key, value in content.items():
        if isinstance(value, Mapping):
            if (found := blamed(value, reason, f"{prefix}{key}.")) is not None:
                return found
        elif isinstance(value, str) and value and (f"'{value}'" in reason or f'"{value}"' in reason):
            return f"{prefix}{key} is {shortened(repr(value))}"
    pad, size = content.get("pad_token_id"), content.get("vocab_size")
    if "padding_idx" in reason.lower() and isinstance(pad, int) and isinstance(size, int) and pad >= size:
        return f"{prefix}pad_token_id is {pad:,}, but {prefix}vocab_size is {size:,}"
    return None


def _impossible(content: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, str]]:
    """Yield (key, problem) for each wrong number, including those of nested configs."""
    for key, value in content.items():
        where = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _impossible(value, f"{where}.")
        elif isinstance(value, list):
            for place, each in enumerate(value):
                if isinstance(each, Mapping):
                    yield from _impossible(each, f"{where}.{place}.")
                elif problem := _number_problem(str(key), each, inside=True):
                    yield where, problem
        elif problem := _number_problem(str(key), value, inside=False):
            yield where, problem
    if content.get("head_dim") == 0 and not content.get("v_head_dim"):  # latent attention uses other keys
        yield f"{prefix}head_dim", "is 0, which must be at least 1"
    counts = [(content[key], key) for key in _EXPERTS if type(content.get(key)) is int]
    if not counts:
        return
    experts, named = min(counts)
    for key in _TOP_K:
        if type(top_k := content.get(key)) is int and not 1 <= top_k <= experts:
            yield f"{prefix}{key}", f"is {top_k:,}, but {prefix}{named} is {experts:,}"
    layers, (experts, named) = content.get("num_hidden_layers"), max(counts)
    if type(layers) is int and layers * experts > _MOST_EXPERTS_IN_ALL:
        problem = f"is {experts:,} in {layers:,} layers, and no model has more than {_MOST_EXPERTS_IN_ALL:,} experts"
        yield f"{prefix}{named}", problem


def _number_problem(key: str, value: Any, *, inside: bool) -> str | None:
    """Return why `value` is not possible for `key`, or None if it is; `inside`: it is an element of a list."""
    if type(value) not in (int, float):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return None if key in _MAY_BE_INFINITE else f"is {value}, which is no number to compute with"
    if abs(value) >= _MAX_NUMBER:
        return f"is {shortened(str(value))}, more than any number of a model"
    if key in _POSITIVE and value <= 0:
        return f"is {value}, which must be above 0"
    if inside or not (kind := _COUNT.fullmatch(key)):
        return None
    # Some configs write -1 for "no limit".
    least, most = 1 if key in _NEVER_ZERO else -1, _MOST["vocab_size" if key.endswith("vocab_size") else kind[1]]
    return None if least <= value <= most else f"is {value:,}, which must be from {least} to {most:,}"
