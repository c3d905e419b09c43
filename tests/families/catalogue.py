"""Which Mixture-of-Experts families the installed transformers brings, found by reading its sources, not from a list.

For the family matrix. A family is a package under `transformers/models` whose modelling code routes tokens to experts:
through the experts interface (`use_experts_implementation`), or in a layout of its own (a module list of MLPs, or 3-D
parameters without the interface). Nothing here builds a model.
"""

import functools
import re
from dataclasses import dataclass
from pathlib import Path

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

_OWN_EXPERTS = re.compile(r"^class (\w*Experts)\(|self\.experts = nn\.ModuleList|self\.experts = nn\.ModuleDict", re.M)
_MODEL_CLASS = re.compile(r"^class (\w+(?:ForCausalLM|ForConditionalGeneration|LMHeadModel))\(", re.M)


@dataclass(frozen=True, slots=True)
class Family:
    """One package of transformers under its name. `model_class` is its language model's, None when it has none.

    `automatic`: whether `AutoModelForCausalLM` knows that class; without it the class needs more than text, or is only
    reached through a vision-language model.
    """

    name: str
    model_class: str | None
    automatic: bool
    interface: bool


@functools.cache
def families() -> tuple[Family, ...]:
    """All of them, by name; those with the experts interface and those without."""
    root = Path(transformers.__file__).parent / "models"
    found = []
    for package in sorted(path for path in root.iterdir() if path.is_dir()):
        source = "".join(path.read_text() for path in sorted(package.glob("modeling_*.py")))
        interface = "\n@use_experts_implementation" in source
        if interface or _OWN_EXPERTS.search(source):
            found.append(_family(package.name, interface, _MODEL_CLASS.findall(source)))
    return tuple(found)


def _family(name: str, interface: bool, classes: list[str]) -> Family:
    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    # A text model comes before the model with a vision tower around it, what transformers finds by itself before both.
    ranked = sorted(classes, key=lambda kind: (kind not in known, not kind.endswith("ForCausalLM"), len(kind)))
    best = ranked[0] if ranked else None
    return Family(name, best, best in known, interface)
