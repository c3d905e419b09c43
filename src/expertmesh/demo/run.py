"""`expertmesh demo [--long] [--output DIR]`: build a small MoE model and data, train it on 2 ranks, or on the one
accelerator that is there, prove that job against the unsharded model, and draw the report.

For a first look at expertmesh on any machine, without downloads: a minute on two cores. Inputs that an earlier demo
left complete are used again; every run gets a directory of its own and nothing is deleted. Everything goes through the
public command line, as a user would start it. Ends with code 1 if the loss did not fall by a third, and with the
code of whatever failed.

The model is a small Qwen3-MoE in the layout of the hub (per-expert safetensors), the tokenizer byte-level BPE with a
ChatML template whose `{% generation %}` marks say what assistant-only loss is computed from.
"""

import json
import platform
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from expertmesh.demo.dataset import Sample, stdlib_samples, write_dataset
from expertmesh.launcher.launch import local_ranks

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{% generation %}{{- message['content'] + '<|im_end|>' -}}{% endgeneration %}
{%- else -%}
{{- message['content'] + '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def train_tokenizer(texts: Iterable[str], vocabulary: int = 1024, max_length: int = 256) -> PreTrainedTokenizerBase:
    """Train byte-level BPE on `texts`; at most `vocabulary` tokens, special ones included. Deterministic."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast: Any = PreTrainedTokenizerFast
    wrapped: PreTrainedTokenizerBase = fast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    return wrapped


SEED = 0


def write_checkpoint(directory: Path, tokenizer: PreTrainedTokenizerBase, max_length: int = 256) -> int:
    """Write model and tokenizer to `directory` and return the number of parameters.

    bfloat16 on disk, as published; the same weights on every machine with the same torch. Leaves torch's
    global random state as it was.
    """
    sizes: dict[str, Any] = dict(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        moe_intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=max_length,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config = Qwen3MoeConfig(**sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model: Any = Qwen3MoeForCausalLM(config)
    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return int(model.num_parameters())


RANKS = 2
MAX_LENGTH = 256
# Steps of the short demo; the long one goes through the data three times, which are about a thousand.
STEPS = 100
# The first step sees the untrained model; the end is a mean over this many steps, since single ones are noisy.
WINDOW = 5
NEEDED_FALL = 1 / 3
PROMPTS = ("What does `os.path.join` do?", "What does `shutil.copytree` do?", "What is `pathlib.PurePath`?")

CONFIG = """\
# Written by `expertmesh demo`. Train on it with `expertmesh train CONFIG --nproc {ranks}`.
model:
  name_or_path: {model}
precision:
  params: float32
  compute: float32        # bfloat16 on a GPU
data:
  train: [{{path: {train}}}]
  eval: [{{path: {evaluation}}}]
  max_length: {max_length}
  packing: true           # several samples per sequence; attention stays inside each
  loss_on: assistant      # only the answers are learned
optim: {{name: muon, learning_rate: 1.0e-2, max_grad_norm: 1.0}}
schedule: {{name: cosine, warmup_ratio: 0.05}}
train: {{global_batch_size: 4, micro_batch_size: 2, {duration}, seed: 42}}
parallel: {{ep: {ranks}}}         # each rank holds an equal share of the experts
output_dir: {run}
"""


def run(root: Path, long: bool = False) -> int:
    """Run the demo in the directory `root`; returns the exit code."""
    ranks = min(RANKS, local_ranks(None))
    config = build_inputs(root, ranks, long)
    output = fresh_run(root)
    code = _expertmesh("train", str(config), f"output_dir={output}", "--nproc", str(ranks)).returncode
    return code or show(root, output) or prove(config, output, ranks) or draw(output)


def _expertmesh(*arguments: str, quiet: bool = False) -> subprocess.CompletedProcess[str]:
    """Print and run a command of the package; `quiet` keeps what it prints to standard output for the caller."""
    print(f"\n$ expertmesh {' '.join(arguments)}", flush=True)
    command = [sys.executable, "-m", "expertmesh", *arguments]
    return subprocess.run(command, check=False, text=True, stdout=subprocess.PIPE if quiet else None)


def build_inputs(root: Path, ranks: int = RANKS, long: bool = False) -> Path:
    """Make data, tokenizer, model and config for `ranks` under `root` unless they are there; returns the config's path.

    `inputs.json` is written last: where it matches this Python, everything before it is complete.
    """
    data, model, config, stamp = root / "data", root / "model", root / "config.yaml", root / "inputs.json"
    train, evaluation = data / "train.jsonl", data / "eval.jsonl"
    data.mkdir(parents=True, exist_ok=True)
    paths = {"model": model, "train": train, "evaluation": evaluation, "run": root / "run"}
    quoted = {name: _yaml_text(str(path)) for name, path in paths.items()}
    duration = "num_epochs: 3" if long else f"max_steps: {STEPS}"
    text = CONFIG.format(max_length=MAX_LENGTH, ranks=ranks, duration=duration, **quoted)
    config.write_text(text, encoding="utf-8")
    expected = json.dumps({"python": platform.python_version(), "max_length": MAX_LENGTH, "version": 2})
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == expected:
        print(f"using the data and the model of an earlier demo in {root}")
        return config
    stamp.unlink(missing_ok=True)
    samples = stdlib_samples()
    trained, held_out = write_dataset(samples, train, evaluation)
    print(f"data       {trained} questions about Python's standard library in {data}, {held_out} more held out")
    vocabulary, parameters = _build_model(samples, model)
    print(f"tokenizer  {vocabulary} tokens, trained on that text")
    print(f"model      Qwen3-MoE, {parameters / 1e6:.1f} M random parameters, in {model}")
    stamp.write_text(expected, encoding="utf-8")
    return config


def _yaml_text(text: str) -> str:
    """Return `text` as a YAML scalar: plain where that is safe, quoted otherwise."""
    return text if re.fullmatch(r"[\w./-]+", text) else json.dumps(text)


def _build_model(samples: Sequence[Sample], directory: Path) -> tuple[int, int]:
    # Imported here: torch takes seconds, and a bad Python installation is reported before that.

    _hide_progress_bars()
    texts = (text for sample in samples for text in (sample.question, sample.answer))
    tokenizer = train_tokenizer(texts, max_length=MAX_LENGTH)
    return len(tokenizer), write_checkpoint(directory, tokenizer, MAX_LENGTH)


def _hide_progress_bars() -> None:
    """Hide the bars that transformers draws for every file; here those take milliseconds."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def fresh_run(root: Path) -> Path:
    """Return `root/run`, or the first of `run-2`, `run-3`, ... that does not exist yet."""
    runs = (root / f"run-{number}" for number in count(2))
    return next(run for run in chain([root / "run"], runs) if not run.exists())


def show(root: Path, run: Path) -> int:
    """Print where the results are, samples before and after, and the losses; 0 if the loss fell enough."""
    start, end = losses(run / "metrics.jsonl")
    before, after = answers(root / "model"), answers(run / "model")
    print(f"\nresults    {run}/model (a plain Hugging Face directory), {run}/metrics.jsonl, {run}/config.yaml")
    for prompt, old, new in zip(PROMPTS, before, after, strict=True):
        print(f"\n{prompt}\n  before: {old}\n  after:  {new}")
    fall = 1 - end / start
    print(f"\nloss       {start:.3f} -> {end:.3f}: {fall:.0%} lower (first step, mean of the last {WINDOW})")
    if fall < NEEDED_FALL:
        print(f"error: the loss should have fallen by at least {NEEDED_FALL:.0%}", file=sys.stderr)
        return 1
    return 0


def prove(config: Path, run: Path, ranks: int) -> int:
    """Compare the job with the unsharded model, on a small step; print what each part found."""
    arguments = ["--only", "bytes,backward", "--tokens", "512", "--json", str(run / "verification.json")]
    done = _expertmesh("verify", str(config), f"output_dir={run}", "--nproc", str(ranks), *arguments, quiet=True)
    wanted = "" if done.returncode else r"every byte|gradients:|^verified"
    print("\n".join(line for line in done.stdout.splitlines() if re.search(wanted, line)))
    return done.returncode


def draw(run: Path) -> int:
    """Write the report where matplotlib is installed, and say what to try next."""
    if find_spec("matplotlib") is not None and (code := _expertmesh("report", str(run)).returncode):
        return code
    print(
        f"\nnext       expertmesh check {run}/config.yaml               # rows as the model sees them, targets marked"
        f"\n           expertmesh init {run}/model --data train.jsonl   # a configuration for data of your own"
    )
    return 0


def losses(metrics: Path) -> tuple[float, float]:
    """Return the training loss of the first step and the mean over the last `WINDOW` reported steps of a run."""
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    values = [float(row["loss"]) for row in rows if "loss" in row]
    last = values[-WINDOW:]
    return values[0], sum(last) / len(last)


def answers(directory: Path) -> list[str]:
    """Return greedy answers of the model in `directory` to `PROMPTS`, by plain transformers; one line each."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _hide_progress_bars()
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    model: Any = AutoModelForCausalLM.from_pretrained(directory)
    texts = []
    for prompt in PROMPTS:
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        tokens = model.generate(**chat, max_new_tokens=48, do_sample=False)[0, chat["input_ids"].shape[1] :]
        texts.append(textwrap.shorten(tokenizer.decode(tokens, skip_special_tokens=True), 160))
    return texts
