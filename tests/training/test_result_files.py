"""What a run leaves beside its weights: readers of the base read it, and it stops where answers were taught to end."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from expertmesh.cli.main import main
from expertmesh.export.merge import convert, merge
from expertmesh.training.evaluation import end_tokens
from expertmesh.training.run import train
from tests.data.tokenizers_on_the_fly import CHATML, ENDS_DIFFERENTLY, PLAIN_WORDS, bpe_tokenizer
from tests.support.published_files import as_published
from tests.support.ranks import run_ranks, shared_ranks
from tests.training.tiny_run import run_config, write_inputs

OPTIONS = ["train={global_batch_size: 4, max_steps: 1}", "checkpoint.every_steps=1"]
LORA = "lora={r: 2, targets: [attention]}"
TALK = [
    {"messages": [{"role": "user", "content": f"How many {n}?"}, {"role": "assistant", "content": f"{n} of them."}]}
    for n in range(8)
]
EOS, IM_END, RETURN = bpe_tokenizer().convert_tokens_to_ids(["<|eos|>", "<|im_end|>", "<|return|>"])


def _inputs(root: Path, rows: list[dict[str, Any]] = TALK, template: str = CHATML, **generation: Any) -> Path:
    inputs = write_inputs(root / "inputs")
    (inputs / "model" / "chat_template.jinja").write_text(template)
    as_published(inputs / "model", **generation)
    (inputs / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return inputs


def _small(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.iterdir() if path.suffix != ".safetensors" and path.name != "README.md")
    return {path.name: path.read_bytes() for path in files}


def test_every_result_has_the_small_files_of_its_base_byte_for_byte(tmp_path: Path) -> None:
    inputs = _inputs(tmp_path, eos_token_id=[IM_END, EOS])
    base, model, adapter = _small(inputs / "model"), tmp_path / "full", tmp_path / "lora"
    shared_ranks(train, 2, run_config(inputs, model, *OPTIONS, "parallel.ep=2"))
    shared_ranks(train, 1, run_config(inputs, adapter, *OPTIONS, LORA))
    assert _small(model / "model") == base
    for run in (model, adapter):
        assert main(["export", str(run), "--output", str(tmp_path / f"exported {run.name}")]) == 0
    assert _small(tmp_path / "exported full") == base
    merge(adapter / "adapter", tmp_path / "merged")
    assert _small(tmp_path / "merged") == base
    convert(str(inputs / "model"), tmp_path / "converted")
    assert _small(tmp_path / "converted") == base
    beside = {name: each for name, each in base.items() if name not in ("config.json", "preprocessor_config.json")}
    for directory in (adapter / "adapter", tmp_path / "exported lora"):
        own = _small(directory)
        assert {name: own.pop(name) for name in beside} == beside
        assert own.keys() == {"adapter_config.json", "expertmesh.json"}


def test_a_result_in_another_dtype_says_so_where_its_base_did(tmp_path: Path) -> None:
    inputs = _inputs(tmp_path, eos_token_id=IM_END)
    shared_ranks(train, 1, run_config(inputs, tmp_path / "run", *OPTIONS, "save.dtype=bfloat16"))
    base, saved = (
        json.loads((each / "config.json").read_text()) for each in (inputs / "model", tmp_path / "run/model")
    )
    assert saved == base | {"torch_dtype": "bfloat16"}


TEXT = [{"text": f"A document of {n} words."} for n in range(8)]
COMPLETIONS = [{"prompt": f"{n} and {n}?", "completion": f"It is {n}."} for n in range(8)]
PAIRS = [{"prompt": f"{n}?", "chosen": f"It is {n}.", "rejected": "No."} for n in range(8)]
UNANSWERED: list[dict[str, Any]] = [{"messages": [*row["messages"], row["messages"][0]]} for row in TALK]
# Rows, template, the base's eos_token_id, and what is saved.
ENDS: dict[str, tuple[list[dict[str, Any]], str, Any, Any]] = {
    "the template's end": (TALK, CHATML, EOS, [IM_END, EOS]),
    "no end before": (TALK, CHATML, None, IM_END),
    "one of several": (TALK, CHATML, [RETURN, IM_END], [RETURN, IM_END]),
    "the last turn's end": (TALK, ENDS_DIFFERENTLY, IM_END, [RETURN, IM_END]),
    "a turn in the middle": (UNANSWERED, ENDS_DIFFERENTLY, EOS, EOS),
    "no end token": (TALK, PLAIN_WORDS, IM_END, IM_END),
    "text": (TEXT, CHATML, IM_END, [EOS, IM_END]),
    "completions": (COMPLETIONS, CHATML, IM_END, [EOS, IM_END]),
    "pairs": (PAIRS, CHATML, IM_END, [EOS, IM_END]),
}


@pytest.mark.slow_cases(r"(?!no end before|one of several|pairs).*", why="a run each; three stay")
@pytest.mark.parametrize(("rows", "template", "before", "after"), ENDS.values(), ids=ENDS)
def test_the_saved_model_stops_at_what_ends_trained_answers(
    rows: list[dict[str, Any]],
    template: str,
    before: Any,
    after: Any,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    inputs = _inputs(tmp_path, rows, template, eos_token_id=before)
    base = json.loads((inputs / "model" / "generation_config.json").read_text())
    options = [*OPTIONS, *["objective={name: dpo}"] * (rows is PAIRS)]
    run = tmp_path / "run"
    run_ranks(train, 1, run_config(inputs, run, *options))
    said = capfd.readouterr().out
    assert main(["export", str(run), "--output", str(tmp_path / "exported")]) == 0
    for directory in (run / "model", tmp_path / "exported"):
        assert json.loads((directory / "generation_config.json").read_text()) == base | {"eos_token_id": after}
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    assert end_tokens(model) == set(after if isinstance(after, list) else [after])
    line = f"the generation_config that is saved has eos_token_id {after}"
    assert said.count(line) == (before != after)
    capfd.readouterr()
    assert main(["check", str(run / "config.yaml"), f"output_dir={tmp_path / 'checked'}"]) == 0
    assert " ".join(capfd.readouterr().out.split()).count(line) == (before != after)


def test_an_adapter_and_what_it_is_merged_into_stop_where_it_was_taught(tmp_path: Path) -> None:
    inputs, run = _inputs(tmp_path, eos_token_id=EOS), tmp_path / "run"
    shared_ranks(train, 1, run_config(inputs, run, *OPTIONS, LORA))
    assert main(["export", str(run), "--output", str(tmp_path / "exported")]) == 0
    merge(run / "adapter", tmp_path / "merged")
    for directory in (run / "adapter", tmp_path / "exported", tmp_path / "merged"):
        content = json.loads((directory / "generation_config.json").read_text())
        assert content == {"top_p": 0.8, "eos_token_id": [IM_END, EOS]}, directory
