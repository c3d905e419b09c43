"""Images of rows: read, given tokens by the model family's own processor, and put into micro-batches.

A row's images are known by path or bytes and the SHA-256 of their content (`Picture`). When rows are tokenized, each
placeholder that the chat template writes becomes the tokens that the processor makes of that image (`Images.expanded`);
the pixels are made again, from the file, when a micro-batch is assembled (`Images.add_to`), so that only those of one
step are in memory. All tensors are the processor's: nothing here knows a family. URLs are never fetched.
"""

import base64
import binascii
import hashlib
import io
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from pydantic import TypeAdapter, ValidationError
from transformers import AutoImageProcessor, PreTrainedConfig, PreTrainedTokenizerBase, ProcessorMixin
from transformers.models.auto.auto_mappings import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.utils.import_utils import is_torchvision_available

from expertmesh.config.errors import ExpertmeshError, InputError, IntegrityError
from expertmesh.data.formats import ImageSource, MalformedRow
from expertmesh.io.reading import MAX_ROW_BYTES, read_file

if TYPE_CHECKING:
    from expertmesh.data.loader import Batch, Row
    from expertmesh.data.tokenized import TokenizedDataset

# Pillow reads more kinds, some of them through other programs.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
# Keys of text that the loader makes itself.
_OF_ROWS = ("input_ids", "attention_mask")
_BLANK_SIZE = (32, 32)
# Another shape, of more tiles or patches in any family.
_OTHER_SIZE = (640, 448)


@dataclass(frozen=True, slots=True)
class Picture:
    """One image of a sample."""

    sha256: str
    """SHA-256 of its file."""
    path: str | None
    """Its file; None if the sample holds the bytes."""
    size: int
    """Bytes of the file."""
    start: int = 0
    """Position of its first token in the sample."""
    tokens: int = 0
    """Its tokens, with those that the processor writes around its patches."""


_DESCRIBED = TypeAdapter(list[Picture])


@dataclass(frozen=True, slots=True)
class _Processed:
    """The tensors that the processor makes of one image alone."""

    ids_N: npt.NDArray[np.int64]
    """Its tokens."""
    of_tokens: Mapping[str, torch.Tensor]
    """Tensors with a value per token, `[N]`."""
    of_images: Mapping[str, torch.Tensor]
    """Tensors of pixels, grids and the like, joined along dim 0."""


class Images:
    """The images of a data set, for one model. The processor is loaded when the first image is met.

    Args:
        config: The model's config.json.
        directory: The directory of the model's files.
        trust: Let a processor's own code run.
        dtype: What the model computes in. Pixels are widened to it, which is exact: Llama 4's are bfloat16.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        directory: Path,
        tokenizer: PreTrainedTokenizerBase,
        trust: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._config, self._directory, self._tokenizer, self._trust = config, directory, tokenizer, trust
        self._dtype = dtype
        self._proven = False

    @cached_property
    def processor(self) -> Any:
        """The part of the family's processor for text and images.

        Raises:
            InputError: The model reads no images, its processor is absent, or a package is missing.
        """
        return _load(self._config, self._directory, self._trust, self._tokenizer)

    @cached_property
    def token_id(self) -> int | None:
        """The token whose embeddings the model replaces by an image's; None if it reads none."""
        ids = (getattr(self._config, name, None) for name in ("image_token_id", "image_token_index"))
        return next((each for each in ids if isinstance(each, int)), None)

    @property
    def placeholder(self) -> str:
        """Return the text that the chat template writes for an image."""
        return str(self.processor.image_token)

    def settings(self) -> dict[str, Any]:
        """Return what the tokens of images depend on, without loading the processor."""
        files = (self._directory / name for name in ("preprocessor_config.json", "processor_config.json"))
        return {"token": self.token_id} | {
            path.name: hashlib.sha256(read_file(path)).hexdigest() for path in files if path.is_file()
        }

    def expanded(
        self, text: str, ids: npt.NDArray[np.int32], sources: Sequence[ImageSource], base: Path | None
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], bytes]:
        """Return a row's ids with the tokens of its images, for each its place in `ids` (-1 for an image's), and the
        blob of its pictures.

        Args:
            text: The row as the chat template wrote it, `ids` its tokens.
            base: The directory of relative paths; None if the row lies in no local file.

        Raises:
            MalformedRow: An image cannot be read, or the template wrote another number of placeholders.
        """
        places = np.flatnonzero(ids == self._tokenizer.convert_tokens_to_ids(self.placeholder))
        if len(places) != len(sources):
            raise MalformedRow(
                f"the row has {len(sources)} images, and its text, as the chat template writes it, {len(places)} times "
                f"{self.placeholder!r}",
                mend="write an image part for each image, the placeholder nowhere else, and use a template that "
                "writes images",
            )
        contents, made = [], []
        for number, source in enumerate(sources, start=1):
            try:
                contents.append(read_source(source, base))
                made.append(self.process(contents[-1]))
            except MalformedRow as error:
                raise MalformedRow(f"image {number} of the row {error}", error.mend) from None
        parts: list[npt.NDArray[np.int32]] = []
        origins: list[npt.NDArray[np.int64]] = []
        pictures, before = [], 0
        for place, source, content, image in zip(places.tolist(), sources, contents, made, strict=True):
            parts += [ids[before:place], image.ids_N.astype(np.int32)]
            origins += [np.arange(before, place), np.full(len(image.ids_N), -1)]
            path = None if source.path is None else str(((base or Path()) / source.path).absolute())
            start = sum(map(len, parts)) - len(image.ids_N)
            digest = hashlib.sha256(content).hexdigest()
            pictures.append(Picture(digest, path, len(content), start, len(image.ids_N)))
            before = place + 1
        self.refuse_token(np.delete(ids, places))
        joined = np.concatenate([*parts, ids[before:]])
        if not self._proven:
            two = [_grey(size) for size in (_BLANK_SIZE, _OTHER_SIZE)]
            self._prove(self.placeholder * len(two), None, two)
            self._prove(text, joined, contents)
            self._proven = True
        return joined, np.concatenate([*origins, np.arange(before, len(ids))]), to_blob(pictures, contents)

    def refuse_token(self, ids: npt.NDArray[np.int32]) -> None:
        """Raise `MalformedRow` if ids that are of no image hold the token that the model replaces by one."""
        if self.token_id is not None and bool((ids == self.token_id).any()):
            name = self._tokenizer.convert_ids_to_tokens(self.token_id)
            raise MalformedRow(f"a text of the row holds {name!r}, which stands for an image")

    def process(self, content: bytes) -> _Processed:
        """Return what the processor makes of the bytes of an image file. Raises `MalformedRow` for a damaged one."""
        image = _opened(content)
        try:
            found = self._called(self.placeholder, [image])
        except (ValueError, OSError) as error:
            raise MalformedRow(f"is refused by the processor ({' '.join(str(error).split())[:200]})") from error
        of_tokens = {key: found[key][0] for key in self._keys_of_tokens if key in found}
        of_images = {key: value for key, value in found.items() if key not in self._keys_of_tokens}
        return _Processed(found["input_ids"][0].numpy(), of_tokens, of_images)

    @cached_property
    def blank(self) -> _Processed:
        """A small grey image, for a micro-batch without any while another rank has some."""
        return self.process(_grey(_BLANK_SIZE))

    def add_to(
        self, batch: "Batch", dataset: "TokenizedDataset", rows: Sequence["Row"], pad_token_id: int, *, needed: bool
    ) -> None:
        """Add the images of the rows of a micro-batch to it, all along dim 0 in the order of the rows.

        Without an image of its own a batch gets a blank one behind the tokens of its first row if it is `needed`:
        the tower's collectives are those of all ranks. No token attends to it, and it has no target.

        Raises:
            IntegrityError: The file of an image has changed since its tokens were made.
        """
        found: list[tuple[int, int, _Processed]] = []
        for row, samples in enumerate(rows):
            assert len(samples) == 1, "rows with images are not packed"
            index = int(samples[0])
            for picture, content in from_blob(dataset.pictures(index)):
                where = dataset.position(index)
                made = self.process(_unchanged(picture, content, where))
                stop = picture.start + picture.tokens
                if not np.array_equal(batch["input_ids"][row, picture.start : stop].numpy(), made.ids_N):
                    raise IntegrityError(
                        f"{where}: the processor makes other tokens of an image than when the data was prepared; "
                        "remove the prepared data, and it is made anew",
                        key="data.damaged-preparation",
                    )
                found.append((row, picture.start, made))
        if not found and needed:
            found.append((0, self._make_room(batch, int(batch["attention_mask"][0].sum()), pad_token_id), self.blank))
        for row, start, made in found:
            for key, value in made.of_tokens.items():
                if key not in _OF_ROWS:
                    batch.setdefault(key, torch.zeros_like(batch["input_ids"]))
                    batch[key][row, start : start + len(value)] = value
        if found:
            batch.update(self._joined([made for _, _, made in found]))

    def _make_room(self, batch: "Batch", start: int, pad_token_id: int) -> int:
        """Write the blank's tokens behind `start` tokens of the first row; return where they begin."""
        ids = torch.from_numpy(self.blank.ids_N)
        missing = max(0, start + len(ids) - batch["input_ids"].shape[1])
        fill = {"input_ids": pad_token_id, "labels": -100, "attention_mask": 0, "real_tokens": False}
        for key, value in fill.items():
            batch[key] = torch.nn.functional.pad(batch[key], (0, missing), value=value)
        batch["input_ids"][0, start : start + len(ids)] = ids
        batch["attention_mask"][0, start : start + len(ids)] = 1
        return start

    @cached_property
    def _keys_of_tokens(self) -> frozenset[str]:
        """The keys that have a value per token: those of text alone."""
        return frozenset(self._called("a", None))

    def _called(self, text: str, images: Sequence[Any] | None) -> dict[str, torch.Tensor]:
        given = {} if images is None else {"images": list(images)}
        found = dict(self.processor(text=[text], **given, add_special_tokens=False, return_tensors="pt"))
        wide = {key: torch.promote_types(t.dtype, self._dtype) for key, t in found.items() if t.is_floating_point()}
        return found | {key: found[key].to(dtype) for key, dtype in wide.items()}

    def _prove(self, text: str, ids: npt.NDArray[np.int32] | None, contents: Sequence[bytes]) -> None:
        """Compare what the processor makes of images together with what it makes of each.

        Args:
            ids: What the tokens have to be; None for those of the images alone.

        Raises:
            InputError: They differ: this processor does not treat images one by one.
        """
        made = [self.process(content) for content in contents]
        joined = self._joined(made)
        ids = np.concatenate([each.ids_N for each in made]) if ids is None else ids
        try:
            whole = self._called(text, [_opened(content) for content in contents])
        except ValueError as error:  # tensors of several sizes cannot become one
            raise self._unsupported() from error
        if whole.keys() - self._keys_of_tokens != joined.keys() or not np.array_equal(whole["input_ids"][0], ids):
            raise self._unsupported()
        if not all(torch.equal(whole[key], value) for key, value in joined.items()):
            raise self._unsupported()

    def _joined(self, made: Sequence[_Processed]) -> dict[str, torch.Tensor]:
        """Return the tensors of images along dim 0. Raises `InputError` if those of two images do not fit together."""
        shapes = [{key: value.shape[1:] for key, value in each.of_images.items()} for each in made]
        if any(shape != shapes[0] for shape in shapes):
            raise self._unsupported()
        return {key: torch.cat([each.of_images[key] for each in made]) for key in shapes[0]}

    def _unsupported(self) -> InputError:
        return InputError(
            f"{type(self.processor).__name__} makes other tensors of images together than of each by itself, which is "
            "not supported; train on text with this model",
            key="model.no-image-processor",
        )


def to_blob(pictures: Sequence[Picture], contents: Sequence[bytes]) -> bytes:
    """Return pictures as a line of JSON, followed by the contents of those without a path."""
    held = (content for picture, content in zip(pictures, contents, strict=True) if picture.path is None)
    return b"\n".join((json.dumps([asdict(each) for each in pictures]).encode(), b"".join(held)))


def from_blob(blob: bytes) -> list[tuple[Picture, bytes | None]]:
    """Return what `to_blob` was given, None for the content of a picture with a path; nothing for an empty blob.

    Raises:
        IntegrityError: Its line of JSON is damaged.
    """
    header, _, rest = blob.partition(b"\n")
    found: list[tuple[Picture, bytes | None]] = []
    try:
        pictures = _DESCRIBED.validate_json(header, strict=True) if blob else []
    except ValidationError as error:
        raise IntegrityError(
            "the images of a row are damaged in the prepared data; remove the prepared data, and it is made anew",
            key="data.damaged-preparation",
        ) from error
    for picture in pictures:
        held = None if picture.path is not None else rest[: picture.size]
        rest = rest[len(held or b"") :]
        found.append((picture, held))
    return found


def ends_of(blob: bytes) -> int:
    """Return where the last image of a sample ends; 0 without any."""
    return max((picture.start + picture.tokens for picture, _ in from_blob(blob)), default=0)


def moved(blob: bytes, by: int) -> bytes:
    """Return the blob of a sample that has `by` tokens fewer before its images."""
    found = from_blob(blob)
    kept = [content or b"" for _, content in found]
    return to_blob([replace(picture, start=picture.start - by) for picture, _ in found], kept)


def read_source(source: ImageSource, base: Path | None) -> bytes:
    """Return the bytes of an image file. Raises `MalformedRow` if it cannot be read."""
    if source.path is None:
        if isinstance(source.content, bytes):
            return source.content
        try:
            return base64.b64decode(source.content or "", validate=True)
        except (binascii.Error, ValueError) as error:
            raise MalformedRow(f"has bytes that are a string and not base64 ({error})") from None
    if base is None and not Path(source.path).is_absolute():
        raise MalformedRow(
            f"is the path {source.path!r}, and the row lies in no local file that it could be relative to",
            mend="put the bytes of the image into the row, as Parquet can hold them",
        )
    path = (base or Path()) / source.path
    try:
        return read_file(path, MAX_ROW_BYTES)
    except (OSError, ValueError, ExpertmeshError) as error:  # the last for pipes, devices and what is too large
        reason = getattr(error, "strerror", None) or str(error).removeprefix(f"{path}: ")
        raise MalformedRow(f"is {str(path)!r}, which cannot be read ({reason})") from None


def _unchanged(picture: Picture, content: bytes | None, where: str) -> bytes:
    """Return the bytes of a picture, which are those that its tokens were made of."""
    try:
        found = content if content is not None else read_source(ImageSource(path=picture.path), None)
    except MalformedRow as error:
        raise IntegrityError(f"{where}: an image {error}; put it back", key="data.changed-image") from error
    if hashlib.sha256(found).hexdigest() != picture.sha256:
        raise IntegrityError(
            f"{where}: the image {picture.path or 'in the row'} has changed since the data was prepared; put it back, "
            "or remove the prepared data, and it is made anew",
            key="data.changed-image",
        )
    return found


def _opened(content: bytes) -> Any:
    """Return an image as transformers' loader does: upright, in RGB. Raises `MalformedRow` for a damaged file."""
    try:
        from PIL import Image, UnidentifiedImageError
        from transformers.image_utils import load_image
    except ImportError as error:
        raise _missing("pillow") from error
    try:
        with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            return load_image(image)
    except (
        *(ArithmeticError, EOFError, LookupError, OSError, SyntaxError, TypeError, ValueError),
        *(struct.error, Image.DecompressionBombError),
    ) as error:  # what Pillow's readers raise
        reason = "" if isinstance(error, UnidentifiedImageError) else f" ({error})"
        raise MalformedRow(f"is damaged, too large or none of {', '.join(_FORMATS)}{reason}") from None


def _grey(size: tuple[int, int]) -> bytes:
    """Return the file of a grey image, (width, height) pixels."""
    try:
        from PIL import Image
    except ImportError as error:
        raise _missing("pillow") from error
    stream = io.BytesIO()
    Image.new("RGB", size, (128, 128, 128)).save(stream, "PNG")
    return stream.getvalue()


def _load(config: PreTrainedConfig, directory: Path, trust: bool, tokenizer: PreTrainedTokenizerBase) -> Any:
    kind: Any = PROCESSOR_MAPPING.get(type(config), None)  # upstream's mapping has no exact type
    if kind is None or "image_processor" not in kind.get_attributes():
        raise InputError(
            f"a row has images, and transformers has no processor of images for {config.model_type}; train on text, or "
            "choose a model that reads images",
            key="model.no-image-processor",
        )
    makers = IMAGE_PROCESSOR_MAPPING_NAMES.get(config.model_type, {})  # class names by what they stand on
    if [package for package, name in makers.items() if name] == ["torchvision"] and not is_torchvision_available():
        raise _missing("torchvision")
    try:
        pixels = AutoImageProcessor.from_pretrained(directory, trust_remote_code=trust)
        given, _ = kind.get_processor_dict(directory)
        return _of_images(kind, {"image_processor": pixels, "tokenizer": tokenizer}, given)
    except ImportError as error:
        raise _missing("pillow") from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(
            f"{directory}: the processor of images cannot be loaded ({' '.join(str(error).split())[:200]}); put the "
            "model's preprocessor_config.json there",
            key="model.no-image-processor",
        ) from error


def _of_images(kind: type[ProcessorMixin], parts: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
    """Return a processor of this class with `parts` alone: those for video and sound would need more packages."""

    class Part(kind):  # type: ignore[misc, valid-type]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)

    Part.__name__ = kind.__name__
    attributes = kind.get_attributes()
    names = kind.__init__.__code__.co_varnames[: kind.__init__.__code__.co_argcount][1:]
    own = {key: value for key, value in given.items() if key in names and key not in (*attributes, "chat_template")}
    return Part(**{name: parts.get(name) for name in attributes}, **own)


def _missing(package: str) -> InputError:
    extra = "pip install 'expertmesh[images]'" if package == "pillow" else f"pip install {package}"
    return InputError(
        f"a row has images, and reading them needs the {package} package; {extra}", key="install.missing-package"
    )
