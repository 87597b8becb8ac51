"""What MODEL means on the command line: a checkpoint folder, an exported program or an artefact, and inputs for it."""

from __future__ import annotations

import inspect
import logging
import os
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from .artefact import DTYPES, MANIFEST
from .loaded import REQUIRED, LoadedModel

DEFAULT_LENGTH = 128  # tokens


class Refused(Exception):
    """What was asked for cannot be done; the text says why and what to do."""


@dataclass
class Wanted:
    """Which inputs: random ones of these sizes, a text, or those of a file."""

    batch: int = 1
    length: int | None = None
    seed: int = 0
    text: str | None = None
    file: Path | None = None


@dataclass
class Opened:
    """A model with inputs: `inputs` by name, and `arguments` makes of their values the call's (args, kwargs).

    `model` is what compile() takes, or None for an artefact, which `load` opens. `eager` runs it in torch, if it can.
    `position` is that of the last token of a text.
    """

    kind: str
    name: str
    inputs: dict[str, Any]
    arguments: Callable[[list[Any]], tuple[tuple[Any, ...], dict[str, Any]]]
    model: Any = None
    eager: Callable[..., Any] | None = None
    tokenizer: Any = None
    position: int | None = None
    labels: Mapping[int, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def call(self, model: Callable[..., Any]) -> Any:
        args, kwargs = self.arguments(list(self.inputs.values()))
        return model(*args, **kwargs)


def kind_of(path: Path) -> str:
    """One of "checkpoint", "program" and "artefact". Refused if it is none."""
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise Refused(f"{path}: a folder must be a Hugging Face checkpoint, and this one has no config.json")
        return "checkpoint"
    if not path.exists():
        raise Refused(f"{path}: no such file or folder (models are not downloaded: give a local checkpoint folder)")
    if path.suffix == ".pt2":
        return "program"
    if path.suffix == ".forge" or _is_artefact(path):
        return "artefact"
    raise Refused(f"{path}: not a checkpoint folder, nor a .pt2 file of torch.export.save, nor an artefact (.forge)")


def _is_artefact(path: Path) -> bool:
    """Whether a file of another name is one."""
    try:
        with zipfile.ZipFile(path) as archive:
            return MANIFEST in archive.namelist()
    except (OSError, ValueError, zipfile.BadZipFile):
        return False


# --- checkpoints ------------------------------------------------------------------------------------------------------


def open_checkpoint(path: Path, wanted: Wanted, dtype: str, class_name: str | None, tokenizer: Path | None) -> Opened:
    """The model of a folder, as its config's first architecture (or `class_name`) of transformers."""
    transformers = _transformers()
    import torch

    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    name = class_name or next(iter(config.architectures or ()), None)
    made_by: Any = getattr(transformers, name or "AutoModel", None)
    if not hasattr(made_by, "from_pretrained"):
        raise Refused(f"{path}: transformers has no model class {name!r}; name one with --class")
    for part in (config, config.get_text_config(), config.get_text_config(decoder=True)):
        part.use_cache = False  # one call at a time: a cache would only be an output
    model = made_by.from_pretrained(
        path, config=config, local_files_only=True, dtype="auto" if dtype == "auto" else getattr(torch, dtype)
    ).eval()
    model.requires_grad_(False)
    name = type(model).__name__
    opened = Opened("checkpoint", path.resolve().name, {}, lambda values: ((), {}), model, model)
    opened.labels = getattr(config, "id2label", None) or {} if "Classification" in name else {}
    parameters = inspect.signature(model.forward).parameters
    if wanted.text is not None or tokenizer is not None:
        opened.tokenizer = read_tokenizer(tokenizer or path)
    if wanted.file is not None:
        arrays = read_arrays(wanted.file, [model.main_input_name])
        unknown = [key for key in arrays if key not in parameters]
        if unknown:
            raise Refused(f"{wanted.file}: {name} has no input {unknown[0]!r}; it has {', '.join(parameters)}")
    elif wanted.text is not None:
        arrays, opened.position = _text_arrays(opened, parameters, wanted)
    else:
        arrays = _random_arrays(model, parameters, wanted)
    if "input_ids" in arrays:
        _check_length(model, arrays["input_ids"].shape[-1])
    opened.inputs = {key: _tensor(array, model.dtype) for key, array in arrays.items()}
    opened.arguments = lambda values: ((), dict(zip(opened.inputs, values, strict=True)))
    return opened


def _transformers() -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import transformers
    except ImportError:
        raise Refused("a checkpoint folder is read by transformers: pip install transformers safetensors") from None
    log: Any = transformers.utils.logging
    log.set_verbosity_error()
    log.disable_progress_bar()
    for name in ("torchao", "torch.utils._pytree"):  # which transformers loads where it is, and which says so
        logging.getLogger(name).setLevel(logging.ERROR)
    return transformers


def read_tokenizer(path: Path) -> Any:
    """The tokenizer of a folder. Refused if there is none."""
    try:
        return _transformers().AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise Refused(f"{path}: no tokenizer that transformers can read: {str(error).splitlines()[0]}") from None


def _causal(model: Any) -> bool:
    return type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))


def _text_arrays(
    opened: Opened, parameters: Mapping[str, Any], wanted: Wanted
) -> tuple[dict[str, np.ndarray[Any, Any]], int]:
    if "input_ids" not in parameters:
        raise Refused(f"--text: {type(opened.model).__name__} does not read tokens")
    assert wanted.text is not None
    ids, count = encode(opened.tokenizer, wanted.text, wanted.length, wanted.batch)
    arrays = {"input_ids": ids}
    if "attention_mask" in parameters and (not _causal(opened.model) or count < ids.shape[1]):
        arrays["attention_mask"] = _mask(ids, count)
    if "decoder_input_ids" in parameters:
        start = opened.model.config.decoder_start_token_id or 0
        arrays["decoder_input_ids"] = np.full((wanted.batch, 1), start, np.int64)
        count = 1
    return arrays, count - 1


def encode(tokenizer: Any, text: str, length: int | None, batch: int) -> tuple[np.ndarray[Any, Any], int]:
    """(ids [batch, length or as many as there are], how many of each row are the text's; the rest is padding)."""
    tokens = tokenizer(text)["input_ids"]
    if not tokens:
        raise Refused("--text: the tokenizer makes no token of it")
    if length is not None and len(tokens) > length:
        raise Refused(f"--text: {len(tokens)} tokens, and the length is fixed to {length}")
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    row = tokens + [padding] * ((length or len(tokens)) - len(tokens))
    return np.array([row] * batch, np.int64), len(tokens)


def _mask(ids: np.ndarray[Any, Any], count: int) -> np.ndarray[Any, Any]:
    return np.broadcast_to(np.arange(ids.shape[1]) < count, ids.shape).astype(np.int64)


def _random_arrays(model: Any, parameters: Mapping[str, Any], wanted: Wanted) -> dict[str, np.ndarray[Any, Any]]:
    """Random inputs of the kinds that transformers' models take."""
    config, draw, batch = model.config, np.random.default_rng(wanted.seed), wanted.batch
    text = config.get_text_config()
    vocabulary = getattr(text, "vocab_size", None)
    limit = _positions(model, text)
    length = wanted.length or min(DEFAULT_LENGTH, limit)
    main = model.main_input_name
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    if main == "input_ids" and vocabulary:
        arrays[main] = draw.integers(0, vocabulary, (batch, length))
        if "attention_mask" in parameters and not _causal(model):
            arrays["attention_mask"] = np.ones((batch, length), np.int64)
    elif main == "input_features" and hasattr(config, "max_source_positions"):
        arrays[main] = draw.standard_normal((batch, config.num_mel_bins, 2 * config.max_source_positions))
    elif main == "input_values":
        frames = (config.max_length, config.num_mel_bins) if hasattr(config, "num_mel_bins") else (16000,)
        arrays[main] = draw.standard_normal((batch, *frames))
    if main == "pixel_values" or ("pixel_values" in parameters and hasattr(config, "projection_dim")):
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", 224)
        height, width = (size, size) if isinstance(size, int) else size
        arrays["pixel_values"] = draw.standard_normal((batch, getattr(vision, "num_channels", 3), height, width))
    if main not in arrays:
        raise Refused(f"{type(model).__name__}: no rule makes its input {main!r}; give one with --inputs FILE.npz")
    if "decoder_input_ids" in parameters and vocabulary:
        shape = (batch, length if main == "input_ids" else min(wanted.length or 1, limit))
        arrays["decoder_input_ids"] = draw.integers(0, vocabulary, shape)
    return arrays


def _positions(model: Any, config: Any) -> int:
    """How many tokens the model has positions for. RoBERTa's begin after that of the padding."""
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or DEFAULT_LENGTH
    padded = (
        module.padding_idx + 1
        for name, module in model.named_modules()
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None
    )
    return int(limit) - next(padded, 0)


def _check_length(model: Any, length: int) -> None:
    """Refuses more tokens than there are learned positions; rotary ones have no end."""
    learned = [
        name for name, _ in model.named_parameters() if re.search(r"(position_embeddings|embed_positions|wpe)\.", name)
    ]
    limit = _positions(model, model.config.get_text_config())
    if learned and length > limit:
        raise Refused(f"{length} tokens, and {type(model).__name__} has {limit} positions: give fewer (--seq, --text)")


def _tensor(array: np.ndarray[Any, Any], dtype: Any) -> Any:
    """As torch's; floats in the model's dtype."""
    import torch

    tensor = torch.from_numpy(np.array(array, order="C"))
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


# --- exported programs ------------------------------------------------------------------------------------------------


def open_program(path: Path, wanted: Wanted) -> Opened:
    """A file of torch.export.save, with the example inputs that it holds, or random ones like them."""
    import torch
    from torch.utils import _pytree as pytree

    from .signature import Signature

    try:
        program = torch.export.load(path)
    except Exception as error:  # whatever reading a foreign file gives
        raise Refused(f"{path}: torch.export.load cannot read it: {_first(error)}") from None
    if program.example_inputs is None:
        raise Refused(f"{path}: it holds no example inputs; export it again, with torch.export.save as it is")
    args, kwargs = program.example_inputs
    signature = Signature.of_exported(program, args, kwargs)
    leaves = signature.flatten(signature.values(args, kwargs))
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    inputs = {signature.paths[i]: leaves[i] for i in tensors}

    def arguments(values: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        rest = iter({**dict(enumerate(leaves)), **dict(zip(tensors, values, strict=True))}.values())
        trees = [pytree.tree_unflatten([next(rest) for _ in range(s.num_leaves)], s) for s in signature.specs]
        pairs = list(zip(signature.keys, trees, strict=True))
        return tuple(v for k, v in pairs if isinstance(k, int)), {k: v for k, v in pairs if isinstance(k, str)}

    opened = Opened("program", path.stem, inputs, arguments, program, None)
    opened.eager = program.module()
    if wanted.text is not None:
        raise Refused("--text needs a checkpoint folder, or an artefact with --tokenizer FOLDER")
    if wanted.file is not None:
        arrays = _matching(read_arrays(wanted.file, list(inputs)), list(inputs), wanted.file)
        for key, array in arrays.items():
            dtype = inputs[key].dtype
            like = torch.from_numpy(np.array(array, order="C"))
            opened.inputs[key] = like.view(dtype) if dtype is torch.bfloat16 and like.itemsize == 2 else like.to(dtype)
    return opened


# --- artefacts --------------------------------------------------------------------------------------------------------


def open_artefact(model: LoadedModel, path: Path, wanted: Wanted, tokenizer: Path | None) -> Opened:
    """A loaded artefact, with inputs as numpy's arrays."""
    manifest = model.manifest
    program = model._programs[0]
    types = {model._leaves[i][0]: (dtype, shape) for i, dtype, shape in program.leaves}
    unread = [path for path, value in model._leaves if value is REQUIRED and path not in types]
    leaves = [np.zeros(0) if path in unread else value for path, value in model._leaves]
    places = [i for i, _, _ in program.leaves]

    def arguments(values: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        filled = list(leaves)
        for i, value in zip(places, values, strict=True):
            filled[i] = value
        trees = [(p["name"], _tree(p["structure"], filled)) for p in manifest["parameters"]]
        count = manifest["positional"]
        return tuple(tree for _, tree in trees[:count]), dict(trees[count:])

    opened = Opened("artefact", path.stem, {}, arguments)
    draw = np.random.default_rng(wanted.seed)
    if tokenizer is not None:
        opened.tokenizer = read_tokenizer(tokenizer)
    if wanted.file is not None:
        arrays = read_arrays(wanted.file, list(types) or unread)
        arrays = {name: array for name, array in arrays.items() if name not in unread}
        opened.inputs = _matching(arrays, list(types), wanted.file)
        return opened
    opened.inputs = {key: _random(draw, dtype, shape) for key, (dtype, shape) in types.items()}
    if wanted.text is not None:
        if tokenizer is None:
            raise Refused("--text: an artefact has no tokenizer; name a folder that has it with --tokenizer")
        if types.get("input_ids", ("", ()))[0] != "i64" or len(types["input_ids"][1]) != 2:
            raise Refused(f"--text: the artefact has no input_ids; it has {', '.join(types)}")
        batch, length = types["input_ids"][1]
        ids, count = encode(opened.tokenizer, wanted.text, length, batch)
        opened.inputs["input_ids"], opened.position = ids, count - 1
        if "attention_mask" in types:
            opened.inputs["attention_mask"] = _mask(ids, count)
        elif count < length:
            opened.notes.append(f"padded on the right from {count} to {length} tokens, which causal models do not see")
    elif any(dtype[0] in "iu" for dtype, _ in types.values()):
        opened.notes.append("random integers of an artefact are 0 or 1: it does not say how large they may be")
    return opened


def _tree(structure: Any, leaves: list[Any]) -> Any:
    if "leaf" in structure:
        return leaves[structure["leaf"]]
    if "dict" in structure:
        return {key: _tree(child, leaves) for key, child in structure["dict"]}
    if "tuple" in structure:
        return tuple(_tree(child, leaves) for child in structure["tuple"])
    if "object" in structure:
        return _object([(steps, _tree(child, leaves)) for steps, child in structure["object"]])
    return [_tree(child, leaves) for child in structure["list"]]


def _object(parts: list[tuple[list[str | int], Any]]) -> Any:
    """Something with these arrays at these places, each of which is attributes and positions: a cache."""
    if len(parts) == 1 and not parts[0][0]:
        return parts[0][1]
    below: dict[str | int, list[tuple[list[str | int], Any]]] = {}
    for (step, *rest), value in parts:
        below.setdefault(step, []).append((rest, value))
    made = {step: _object(group) for step, group in below.items()}
    numbers = [step for step in made if isinstance(step, int)]
    if numbers:
        return [made.get(i) for i in range(max(numbers) + 1)]
    return SimpleNamespace(**{str(step): value for step, value in made.items()})


def _random(draw: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    if dtype == "bool" or dtype[0] in "iu":
        return draw.integers(0, 2, shape).astype(DTYPES[dtype][1])
    values = draw.standard_normal(shape)
    if dtype == "bf16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(DTYPES[dtype][1])


# --- files of arrays --------------------------------------------------------------------------------------------------


def read_arrays(path: Path, names: list[str]) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of a .npz file by name, or that of a .npy file under the first of `names`. Nothing is unpickled."""
    try:
        found = np.load(path, allow_pickle=False)
        return {names[0]: found} if isinstance(found, np.ndarray) else {key: found[key] for key in found.files}
    except OSError as error:
        raise Refused(f"{path}: {error.strerror or _first(error)}") from None
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        # numpy takes whatever it does not know for a pickle, and advises to unpickle it
        why = "" if "pickle" in str(error) else f": {_first(error)}"
        raise Refused(f"{path}: not a .npz or .npy file of numbers, as numpy.savez and numpy.save write{why}") from None


def _matching(arrays: dict[str, Any], names: list[str], path: Path) -> dict[str, Any]:
    if set(arrays) != set(names):
        raise Refused(f"{path}: it has {', '.join(arrays) or 'nothing'}; the model's inputs are {', '.join(names)}")
    return {name: arrays[name] for name in names}


# --- outputs ----------------------------------------------------------------------------------------------------------


def named_outputs(value: Any, kinds: Any = None, path: str = "") -> dict[str, np.ndarray[Any, Any]]:
    """The arrays in a result by name: "logits", "0", "hidden_states.1"; "output" if it is one.

    `kinds`: of a loaded model, the dtypes in the same structure.
    """
    if isinstance(value, Mapping):
        items: list[tuple[Any, Any]] = list(value.items())
        below = [None if kinds is None else kinds[key] for key, _ in items]
    elif isinstance(value, (tuple, list)):
        items = list(zip(getattr(value, "_fields", range(len(value))), value, strict=True))
        below = [None if kinds is None else kinds[i] for i in range(len(value))]
    elif hasattr(value, "detach") or isinstance(value, np.ndarray):
        return {path or "output": _array(value, kinds)}
    else:
        return {}
    found: dict[str, np.ndarray[Any, Any]] = {}
    for (key, item), kind in zip(items, below, strict=True):
        found.update(named_outputs(item, kind, f"{path}.{key}" if path else str(key)))
    return found


def _array(value: Any, kind: str | None) -> np.ndarray[Any, Any]:
    """numpy's; bfloat16 as float32, which holds the same numbers."""
    if isinstance(value, np.ndarray):
        return (value.astype(np.uint32) << 16).view(np.float32) if kind == "bf16" else value
    tensor = value.detach()
    if str(tensor.dtype) == "torch.bfloat16":
        tensor = tensor.float()
    array: np.ndarray[Any, Any] = tensor.resolve_neg().resolve_conj().numpy()
    return array


def _first(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
