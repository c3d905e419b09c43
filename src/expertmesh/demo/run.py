"""`expertmesh demo [--long] [--output DIR]`: build a small MoE model and data, train it on 2 ranks, or on the one
accelerator that is there, prove that job against the unsharded model, and draw the report.

For a first look at expertmesh on any machine, without downloads: a minute on two cores. Inputs that an earlier demo
left complete are used again; every run gets a directory of its own and nothing is deleted. Everything goes through the
public command line, as a user would start it. Ends with code 1 if the loss did not fall by a third, and with the
code of whatever failed.

The model is a small Qwen3-MoE in the layout of the hub (per-expert safetensors), the tokenizer byte-level BPE with a
ChatML template whose `{% generation %}` marks say what assistant-only loss is computed from. The data are text that
every machine has: `stdlib_samples` reads the source files of Python's standard library (nothing is imported or run) and
turns the docstring of each public function, class and method into one question and its answer; `write_dataset` writes
them as `messages` JSONL. The samples depend on the installed Python alone, and so does their order.
"""

import ast
import inspect
import json
import platform
import re
import subprocess
import sys
import sysconfig
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils import logging

from expertmesh.config.errors import InputError
from expertmesh.launcher.launch import local_ranks

SEED = 0
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
# Tests, an editor, installers and demonstrations: not what someone asks about.
EXCLUDED = {"test", "tests", "idlelib", "lib2to3", "ensurepip", "turtledemo", "pydoc_data", "ntpath"}
EXCLUDED |= {"site-packages", "dist-packages"}
# Modules that are documented under another name.
KNOWN_AS = {"posixpath": "os.path"}
MIN_CHARACTERS = 30
MAX_CHARACTERS = 400
EVAL_EVERY = 20

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True, slots=True)
class Sample:
    """One question about `name`, a dotted name such as `os.path.join`, and its documentation."""

    name: str
    question: str
    answer: str

    def to_json(self) -> str:
        """Return one line of `messages` JSONL."""
        user = {"role": "user", "content": self.question}
        assistant = {"role": "assistant", "content": self.answer}
        return json.dumps({"messages": [user, assistant]}, ensure_ascii=False)


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
    # Plain where that is safe in YAML, quoted otherwise.
    quoted = {k: f"{v}" if re.fullmatch(r"[\w./-]+", f"{v}") else json.dumps(f"{v}") for k, v in paths.items()}
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
    # Here those of each file take milliseconds.
    logging.disable_progress_bar()
    texts = (text for sample in samples for text in (sample.question, sample.answer))
    tokenizer = train_tokenizer(texts, max_length=MAX_LENGTH)
    parameters = write_checkpoint(model, tokenizer, MAX_LENGTH)
    print(f"tokenizer  {len(tokenizer)} tokens, trained on that text")
    print(f"model      Qwen3-MoE, {parameters / 1e6:.1f} M random parameters, in {model}")
    stamp.write_text(expected, encoding="utf-8")
    return config


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
    fast: Any = PreTrainedTokenizerFast  # its stub knows no tokenizer_object
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
    logging.disable_progress_bar()
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


def stdlib_samples(library: Path | None = None) -> list[Sample]:
    """Return samples of the public names in `library` (default: the running Python's), by name, no answer twice.

    Raises `InputError` if there are no source files to read, as in a Python that ships bytecode only.
    """
    library = library or Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, Sample] = {}
    for path in sorted(library.rglob("*.py")):
        module = _module_name(path.relative_to(library))
        if module is not None:
            for sample in _module_samples(path, module):
                found.setdefault(sample.name, sample)
    first = {found[name].answer: found[name] for name in sorted(found, reverse=True)}
    samples = sorted(first.values(), key=lambda sample: sample.name)
    if not samples:
        raise InputError(
            f"demo: no documented Python source under {library}, although the data set is made of it; use a "
            "Python that has its library's source files",
            key="demo.no-python-source",
        )
    return samples


def write_dataset(samples: Sequence[Sample], train: Path, evaluation: Path) -> tuple[int, int]:
    """Write every 20th sample to `evaluation`, the others to `train`; returns how many went to each."""
    counts = []
    for path, held_out in ((train, False), (evaluation, True)):
        lines = [s.to_json() + "\n" for i, s in enumerate(samples) if (i % EVAL_EVERY == EVAL_EVERY - 1) is held_out]
        path.write_text("".join(lines), encoding="utf-8")
        counts.append(len(lines))
    return counts[0], counts[1]


def _module_name(relative: Path) -> str | None:
    """Return the dotted name of a public module's file, None for private and excluded ones."""
    parts = [*relative.parts[:-1], relative.stem]
    if parts[-1] == "__init__":
        parts.pop()
    if not parts or any(part.startswith("_") or part in EXCLUDED or not part.isidentifier() for part in parts):
        return None
    name = ".".join(parts)
    return KNOWN_AS.get(name, name)


def _module_samples(path: Path, module: str) -> Iterator[Sample]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old library files have invalid escapes in their strings
            tree = ast.parse(path.read_bytes())
    except SyntaxError:
        return  # templates and broken-on-purpose files that some installations keep beside the library
    exported = _exported(tree)
    for node in tree.body:
        if isinstance(node, Definition) and (node.name in exported if exported else not node.name.startswith("_")):
            yield from _definition_samples(node, f"{module}.{node.name}")


def _exported(tree: ast.Module) -> set[str]:
    """Return the names in a literal `__all__`; empty when the module has none."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if "__all__" in map(ast.unparse, targets):
                with suppress(ValueError):
                    names.update(ast.literal_eval(node.value))
    return names


def _definition_samples(node: Definition, name: str) -> Iterator[Sample]:
    answer = clean_docstring(ast.get_docstring(node, clean=False) or "")
    if answer:
        asks = "What is `{}`?" if isinstance(node, ast.ClassDef) else "What does `{}` do?"
        yield Sample(name, asks.format(name), answer)
    if isinstance(node, ast.ClassDef):
        for child in node.body:
            if isinstance(child, Definition) and not child.name.startswith("_"):
                yield from _definition_samples(child, f"{name}.{child.name}")


def clean_docstring(docstring: str) -> str:
    """Return the leading prose of a docstring, at most 400 characters cut at a sentence; empty if too little.

    Prose ends at the first doctest, list, indented block or section heading.
    """
    kept: list[str] = []
    for paragraph in inspect.cleandoc(docstring).split("\n\n"):
        lines = paragraph.strip("\n").splitlines()
        if not lines or any(line.startswith((" ", ">>>", "- ", "* ", ":", "|", "+")) for line in lines):
            break
        text = " ".join(" ".join(lines).split())
        if kept and (text.endswith(":") or len(" ".join(kept)) + len(text) >= MAX_CHARACTERS):
            break
        kept.append(text)
    answer = " ".join(kept)
    if len(answer) > MAX_CHARACTERS:  # up to the last sentence that is complete
        head, stop, _ = answer[:MAX_CHARACTERS].rpartition(". ")
        answer = head + stop
    answer = answer.strip()
    return answer if len(answer) >= MIN_CHARACTERS else ""
