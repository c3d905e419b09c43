"""Every kind of hostile input that an attack from outside has used, as tables: what is put where, and who reads it.

A case must end soon, in bounded memory, and in being read or in a named refusal; one that `must` be refused is never
read. What fuzzing (mutations.py) makes at random, stands here once for each file, field and number.
"""

import json
import os
import pickle
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pyarrow
from pyarrow import parquet
from pydantic import BaseModel

from expertmesh.checkpoint.read import open_state
from expertmesh.config import Config, load_config
from expertmesh.config.errors import IntegrityError
from expertmesh.data.encoding.encode import ChatRenderer
from expertmesh.data.encoding.targets import ChatOptions
from expertmesh.data.formats import Conversation
from expertmesh.data.sources import read_source
from expertmesh.export.checkpoint import export
from expertmesh.io.boxes import full_box
from expertmesh.io.safetensors_reader import read_header
from expertmesh.report.page import write as write_page
from expertmesh.verification.checkpoint import verify
from tests.checkpoint.damage import change_manifest, replace_file
from tests.data import test_hostile_templates as templates
from tests.data.tokenizers_on_the_fly import CHATML, bpe_tokenizer
from tests.robustness.readers import CHAT, GOLDEN, READERS, put

SECRET = "content of a file outside"


@dataclass(frozen=True, slots=True)
class Case:
    """`change` makes a sound directory (of `reader`) hostile, `read` reads it; `must`: to be refused."""

    name: str
    change: Callable[[Path], object]
    read: Callable[[Path], object]
    reader: str = ""
    must: bool = False


def _replaced(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.unlink()
        make(path)

    return change


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def _bound(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        here = Path.cwd()
        os.chdir(path.parent)  # a socket's path has 108 characters
        try:
            server.bind(path.name)
        finally:
            os.chdir(here)


NO_FILES: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "endless device": lambda path: path.symlink_to("/dev/zero"),
    "empty device": lambda path: path.symlink_to("/dev/null"),
    "socket": _bound,
    "directory": Path.mkdir,
    "link to nothing": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "a terabyte of nothing": _sparse,
}
_KEYS = ",".join(f'"k{n}": 1' for n in range(200_000))
CONTENTS: dict[str, bytes] = {
    "nothing": b"",
    "zeros": bytes(1 << 20),
    "lists 100,000 deep": b"[" * 100_000 + b"]" * 100_000,
    "lists that do not end": b"[" * 100_000,
    "objects 100,000 deep": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "YAML 1,000 deep": b"{a: " * 1000 + b"1" + b"}" * 1000,
    "100,000 digits": b'{"step": ' + b"9" * 100_000 + b"}",
    "200,000 keys, one twice": f'{{{_KEYS}, "k7": 2}}'.encode(),
    "20 MB of keys": ("{" + ",".join(f'"{n:0100d}": 1' for n in range(180_000)) + "}").encode(),
    "a name of 20 MB": b'{"' + b"a" * 20_000_000 + b'": 1}',
    "Infinity": b'{"vocab_size": Infinity, "r": NaN, "step": -Infinity}',
    "no UTF-8": b"\xff\xfe{\x00}\x00",
    "lone surrogates": b'{"\\ud800": "\\udfff"}',
    "another type": b"[null, true, 1e999]",
    "a text": b'"\\u001b[31m"',
    "a pickle": pickle.dumps({"a": 1}),
}


def of_files() -> Iterator[Case]:
    for name, reader in READERS.items():
        for file in reader.files:
            for what, make in NO_FILES.items():
                if (name, what) == ("configuration", "pipe"):
                    continue  # a user's own: `expertmesh train <(...)`
                yield Case(f"{file}: {what}", lambda path, f=file, m=make: _replaced(m)(path / f), reader.read, name)


def of_contents() -> Iterator[Case]:
    for name, reader in READERS.items():
        for file in reader.files:
            for what, content in CONTENTS.items():
                yield Case(
                    f"{file}: {what}", lambda path, r=reader, f=file, c=content: put(r, path, f, c), reader.read, name
                )


NUMBERS: tuple[Any, ...] = (-5, 0, 10**9, 2**62, 10**400, 0.5, True, "8", None, float("nan"), float("inf"), [1], {})
FIELDS = [
    "vocab_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "decoder_sparse_step",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "router_aux_loss_coef",
    "initializer_range",
    "attention_dropout",
    "pad_token_id",
    "mlp_only_layers",
    "layer_types",
    "hidden_act",
    "auto_map",
    "architectures",
    "model_type",
    "dtype",
    "tie_word_embeddings",
]


def _with(file: str, **changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        (path / file).write_text(json.dumps(json.loads((path / file).read_text()) | changes))

    return change


def of_numbers_of_models() -> Iterator[Case]:
    read = READERS["model"].read
    for field in FIELDS:
        for value in (*NUMBERS, "os.system", "../../x"):
            yield Case(f"{field}: {str(value)[:30]}", _with("config.json", **{field: value}), read, "model")
    never = {"vocab_size": (-5, 0, 2**62), "num_hidden_layers": (0, 10**9), "num_attention_heads": (0, -5)}
    never |= {"head_dim": (0,), "num_experts": (0, 10**9), "num_experts_per_tok": (9, 0), "auto_map": (["a"],)}
    never |= {"rope_parameters": tuple({"rope_type": "default", "rope_theta": n} for n in (0, float("inf")))}
    for field, values in (never | {"hidden_act": ("os.system",)}).items():
        for value in values:
            yield Case(f"never {field}: {value}", _with("config.json", **{field: value}), read, "model", must=True)


def _leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        inner = [kind for kind in (field.annotation, *get_args(field.annotation)) if isinstance(kind, type)]
        sections = [kind for kind in inner if issubclass(kind, BaseModel)]
        if sections and "tuple" not in str(field.annotation):
            yield from _leaves(sections[0], f"{prefix}{name}.")
        else:
            yield prefix + name


OPTIONS = ("-5", "0", "1.0e+18", "1.0e+308", "1.0e+30", ".inf", "'²'", "'a\\0b'", "'~nouser/x'", "[[1]]", "x" * 5000)


def of_numbers_of_configurations() -> Iterator[Case]:
    def read(key: str, value: str) -> Callable[[Path], object]:
        return lambda path: load_config(path / "run.yaml", [f"{key}={value}"])

    for key in _leaves(Config):
        for value in OPTIONS:
            yield Case(f"{key}={value[:20]}", lambda path: None, read(key, value), "configuration")
    for override in (
        "lora.r=1000000000000000000", "lora.alpha=1.0e+308", "train.num_epochs=1000000000",
        "parallel.fsdp=1000000000000", "train.global_batch_size=1000000000000000000",
        "distributed.timeout_seconds=1.0e+30", "train.seed='²'",
        f"model.name_or_path={'x' * 5000}", "output_dir='~nouser/x'", 'output_dir="a\\0b"',
    ):  # fmt: skip
        key, _, value = override.partition("=")
        yield Case(f"never {override[:40]}", lambda path: None, read(key, value), "configuration", must=True)


ADAPTER = [
    "peft_type",
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "target_parameters",
    "modules_to_save",
    "trainable_token_indices",
    "use_rslora",
    "use_dora",
    "bias",
    "revision",
    "init_lora_weights",
    "rank_pattern",
    "alpha_pattern",
    "task_type",
    "layers_to_transform",
    "layers_pattern",
    "exclude_modules",
    "fan_in_fan_out",
    "base_model_name_or_path",
    "auto_mapping",
]


def of_adapters() -> Iterator[Case]:
    read = READERS["adapter"].read
    for field in ADAPTER:
        for value in (*NUMBERS, "yes", "../../x", "a" * 5000, ["(a+)+$"] * 3, {"(a+)+$": 4}):
            yield Case(f"{field}: {str(value)[:30]}", _with("adapter_config.json", **{field: value}), read, "adapter")
    for field, value in (("use_rslora", "yes"), ("lora_dropout", 5), ("revision", "../../x"), ("r", 0), ("r", 10**18)):
        yield Case(
            f"never {field}: {value}", _with("adapter_config.json", **{field: value}), read, "adapter", must=True
        )


def _alike(path: Path) -> None:
    """`verify`, `export` and a resume must come to the same."""
    ends = []
    for judge in (_verified, lambda each: export(each, path.parent / "out"), _resumed):
        try:
            judge(path)
            ends.append(None)
        except Exception as error:
            ends.append(error)
    assert len({type(error) for error in ends}) == 1, [f"{type(error).__name__}: {error}"[:300] for error in ends]
    if ends[0] is not None:
        raise ends[0]


def _verified(path: Path) -> None:
    if findings := verify(path).findings:
        raise IntegrityError(findings[0].text, key="checkpoint.damaged")


def _resumed(path: Path) -> None:
    with open_state(path) as state:
        for name, entry in state.manifest.model.items():
            box = full_box(entry.shape)
            state.check_finite(name, box, state.read(name, box))


MANIFEST = [
    "format",
    "schema_version",
    "step",
    "created",
    "world_size",
    "layout",
    "versions",
    "files",
    "trained",
    "tilings",
    "model",
    "optimizer",
]


def of_manifests() -> Iterator[Case]:
    def case(name: str, change: Callable[[dict[str, Any]], object]) -> Case:
        return Case(
            name,
            lambda path: change_manifest(change)(path / GOLDEN.name),
            lambda path: _alike(path / GOLDEN.name),
            "checkpoint",
            must=True,
        )

    for field in MANIFEST:
        for value in (-1, 2**70, 1.5, True, None, "x", [], {}, [None], {"a": None}):
            if (field, value) not in (("versions", {}), ("trained", [])):  # sound; found by verify alone
                yield case(f"{field}: {value}", lambda m, f=field, v=value: m.update({f: v}))
    for axis in ("pp", "replicate", "fsdp", "cp", "tp", "ep", "efsdp"):
        for size in (-1, 0, 3, 2**70, True, None):
            yield case(f"layout.{axis}: {size}", lambda m, a=axis, s=size: m["layout"].update({a: s}))
    for field, values in {"copies": (0, 10**9), "ranks": ([0, 0], [5]), "cuts": ([[0, 96], [8]], [[], []], [])}.items():
        for value in values:
            yield case(f"tiling.{field}: {value}", lambda m, f=field, v=value: m["tilings"][0].update({f: v}))
    yield Case(
        "a directory renamed to another step",
        lambda path: (path / GOLDEN.name).rename(path / "step-00000009"),
        lambda path: _alike(path / "step-00000009"),
        "checkpoint",
        must=True,
    )


def _cells(cuts: list[list[int]], ranks: list[int]) -> Callable[[Path], None]:
    """A manifest whose first tensor is cut into as many parts as there are `ranks`."""

    def change(manifest: dict[str, Any]) -> None:
        manifest["tilings"].append({"cuts": cuts, "ranks": ranks})
        entry = manifest["model"]["model.embed_tokens.weight"]
        entry.update(shape=[200, 100], tiling=len(manifest["tilings"]) - 1)

    return lambda path: change_manifest(change)(path / GOLDEN.name)


def _header(entries: Iterator[tuple[str, Any]], data: bytes = b"") -> Callable[[Path], None]:
    def change(path: Path) -> None:
        header = json.dumps(dict(entries)).encode()
        (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)

    return change


def of_great_numbers() -> Iterator[Case]:
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    one = {"dtype": "U8", "shape": [1]}

    def read(path: Path) -> None:
        read_header(path / "model.safetensors")

    for count in (100_000, 1_000_000):
        many = lambda count=count: ((str(n), empty) for n in range(count))  # noqa: E731
        yield Case(f"{count:,} empty tensors", lambda path, m=many: _header(m())(path), read, "", count > 500_000)
    for name, offsets in {
        "overlapping": lambda n: [n // 2, n // 2 + 1],
        "backwards": lambda n: [n + 1, n],
        "beyond the file": lambda n: [n + 2**40, n + 1 + 2**40],
    }.items():
        bad = lambda o=offsets: ((str(n), one | {"data_offsets": o(n)}) for n in range(100_000))  # noqa: E731
        yield Case(f"100,000 {name}", lambda path, b=bad: _header(b(), bytes(100_000))(path), read, "", must=True)

    def opened(path: Path) -> None:
        with open_state(path / GOLDEN.name):
            pass

    grid, many = [list(range(201)), list(range(101))], 20_000
    for name, cuts, ranks in (
        ("of as many ranks", grid, list(range(many))),
        ("of one rank", grid, [0] * many),
        ("that do not ascend", [[0] * 201, [0] * 101], list(range(many))),
    ):
        yield Case(f"20,000 parts {name}", _cells(cuts, ranks), opened, "checkpoint", must=True)


def of_rows() -> Iterator[Case]:
    def read(path: Path) -> None:
        for file in path.iterdir():
            for row in read_source(str(file)):
                assert row.problem is None or len(row.problem) < 2000

    def table(name: str, column: Callable[[], Any], must: bool = False) -> Case:
        def make(path: Path) -> None:
            parquet.write_table(pyarrow.table({"text": column()}), path / "a.parquet")

        return Case(name, make, read, "", must)

    def bomb() -> Any:
        index = pyarrow.array([0] * 100_000, pyarrow.int32())
        return pyarrow.DictionaryArray.from_arrays(index, pyarrow.array(["x" * (1 << 20)]))

    twice = pyarrow.struct([pyarrow.field("a", pyarrow.int64()), pyarrow.field("a", pyarrow.int64())])
    yield table("Parquet dictionary of 100 GB", bomb, must=True)
    for unit, last in (("s", 10**15), ("ms", 2**62), ("us", -(2**62)), ("ns", 2**62)):
        stamps = lambda u=unit, n=last: pyarrow.array([n, None], pyarrow.timestamp(u))  # noqa: E731
        yield table(f"Parquet time of {last} {unit}", stamps)
    yield table("Parquet date out of range", lambda: pyarrow.array([2**31 - 1, -(2**31)], pyarrow.date32()))
    pairs = [pyarrow.array([1]), pyarrow.array([2])]
    yield table("Parquet field twice", lambda: pyarrow.StructArray.from_arrays(pairs, fields=list(twice)))
    for suffix in ("jsonl", "json", "csv", "tsv", "txt"):
        for name, content in (CONTENTS | {"a row of 80 MB": b'{"text": "' + b"a" * 80_000_000 + b'"}\n'}).items():
            yield Case(f"{suffix}: {name}", lambda path, s=suffix, c=content: (path / f"a.{s}").write_bytes(c), read)


def of_templates() -> Iterator[Case]:
    def read(
        template: str, messages: tuple[dict[str, Any], ...] = templates.HELLO.messages
    ) -> Callable[[Path], object]:
        return lambda path: ChatRenderer(bpe_tokenizer(template + CHATML), ChatOptions()).render(
            [Conversation(messages)]
        )

    more = (
        "{{ range(10 ** 9) | list | length }}",
        "{{ messages | tojson(indent=10 ** 9) }}",
        "{{ ('a\\n' * 10 ** 6) | indent(10 ** 6) }}",
        "{{ strftime_now('%Y' * 10 ** 8) }}",
        "{% for i in range(10 ** 8) %}{{ strftime_now('%c') }}{% endfor %}",
    )
    for template in (*(template for template, _ in templates.CASES), *more):
        yield Case(template[:60], lambda path: None, read(template), "", must=True)
    for turns in (100, 4000):
        yield Case(f"a row of {turns:,} turns", lambda path: None, read("", tuple(CHAT * (turns // 2))))
    slow = "{% for m in messages %}{% for k in messages %}{% endfor %}{% endfor %}"
    yield Case("thousands of turns, quadratic", lambda path: None, read(slow, tuple(CHAT * 2000)))


def of_links() -> Iterator[Case]:
    """What leads out of a checkpoint or of a run is not copied, and not written through."""

    def outside(path: Path) -> Path:
        (path.parent / "outside").write_text(SECRET)
        return path.parent / "outside"

    def exported(path: Path) -> None:
        try:
            export(path / GOLDEN.name, path / "out")
        finally:
            found = [file for file in (path / "out").rglob("*") if file.is_file()]
            assert not any(SECRET.encode() in file.read_bytes() for file in found)

    for name in ("config.json", "generation_config.json"):
        changes: dict[str, Callable[[Path], object]] = {
            "a link out": lambda file: file.symlink_to(outside(file.parents[2])),
            "a hard link's pickle": lambda file: file.write_bytes(pickle.dumps({"a": 1})),
        }
        for what, make in changes.items():
            yield Case(
                f"huggingface/{name}: {what}",
                lambda path, n=name, m=make: _replaced(m)(path / GOLDEN.name / "huggingface" / n),
                exported, "checkpoint", must=True,
            )  # fmt: skip
    for name in ("pytorch_model.bin", "x.pt", "x.pth", "x.ckpt", "x.pkl", "tokenizer.json"):

        def listed(path: Path, name: str = name) -> None:
            target = path / GOLDEN.name / "huggingface" / name
            entry = {"name": f"huggingface/{name}", "bytes": 0, "sha256": "0" * 64}
            change_manifest(lambda m: m["files"].append(entry))(path / GOLDEN.name)
            target.touch()
            replace_file(f"huggingface/{name}", pickle.dumps({"a": 1}))(path / GOLDEN.name)

        yield Case(f"a pickle that the manifest lists as {name}", listed, exported, "checkpoint", must=True)
    for name in ("../outside", "/etc/hostname", "a/../../outside", "", ".", "model\\x", "\0"):
        entry = {"name": name, "bytes": 1, "sha256": "0" * 64}
        change = change_manifest(lambda m, e=entry: m["files"].append(e))
        yield Case(
            f"a manifest that lists {name!r}",
            lambda path, c=change: c(path / GOLDEN.name),
            exported,
            "checkpoint",
            True,
        )
    for name in ("report.html", "report.html.tmp"):

        def linked(path: Path, name: str = name) -> None:
            (path / name).symlink_to(outside(path))

        def written(path: Path) -> None:
            write_page(path / "report.html", "<html>")
            assert (path.parent / "outside").read_text() == SECRET

        yield Case(f"a report through {name}", linked, written)


KINDS: dict[str, Callable[[], Iterator[Case]]] = {
    "no regular file where one is expected": of_files,
    "files deep, long, ambiguous or of another kind": of_contents,
    "numbers that no model has": of_numbers_of_models,
    "numbers that no run has": of_numbers_of_configurations,
    "adapter configs of wrong types": of_adapters,
    "manifests that cannot be, judged by three readers": of_manifests,
    "hundreds of thousands of tensors and parts": of_great_numbers,
    "rows and tables without bounds": of_rows,
    "templates that reach out or explode": of_templates,
    "links, pickles and names that lead out": of_links,
}
