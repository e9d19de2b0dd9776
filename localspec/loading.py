"""From a model's name to an engine: resolve, check that it fits, load, choose the weights' format, pair with a draft.

Knows nothing about decoding.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localspec import hub, memory
from localspec.checkpoint import Checkpoint, context_length, end_ids, read_checkpoint
from localspec.errors import (
    IncompatibleDrafterError,
    IncompleteModelError,
    InsufficientMemoryError,
    SettingsError,
    UnsupportedModelError,
)
from localspec.memory import format_bytes
from localspec.models import catalogue
from localspec.package import Progress
from localspec.vocabulary import check_same_vocabulary

if TYPE_CHECKING:
    from localspec.engine import Engine
    from localspec.kernels.selection import Kernels
    from localspec.learning import Learning

DTYPES = ("float32", "bfloat16", "float16", "quantized")
"""What `dtype=` may be; `quantized` keeps the weights as they are stored."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """A model that is here and whole, and how to hold it in memory."""

    name: str
    checkpoint: Checkpoint
    dtype: str

    @property
    def bytes(self) -> int:
        return memory.weights_bytes(self.checkpoint, self.dtype)


def load(
    name: str | os.PathLike[str],
    *,
    draft: str | os.PathLike[str] | None = None,
    draft_through_text: bool = False,
    dtype: str | None = None,
    drafters: Sequence[Any] | None = None,
    progress: Progress | None = None,
    kernels: str | Kernels = "auto",
    learn: bool = False,
    notify: Callable[[str], None] | None = None,
) -> Engine:
    """Load a model by catalogue name, local directory or hub id, fetching it if need be, and make an engine of it.

    `draft` names a smaller model with the same vocabulary that drafts for it, after the other `drafters` (n-grams when
    None); "layers" or "layers:N" has it draft for itself, with N of its layers. `draft_through_text` allows a draft
    with another vocabulary, which is slower. `dtype` is one of DTYPES; None takes what runs fastest on this machine.
    `kernels` and `learn` are as in Engine; `notify` is told in one line what is amiss with what was learned, None
    warns. Everything is loaded and evaluated in the calling thread, which is the one to generate in.
    """
    from localspec.engine import Engine
    from localspec.kernels.selection import Kernels

    if dtype is not None and dtype not in DTYPES:
        raise SettingsError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    kernels = kernels if isinstance(kernels, Kernels) else Kernels(kernels)
    plan = _plan(os.fspath(name), dtype, progress)
    own_layers = layers_asked_for(draft)
    if draft_through_text and (draft is None or own_layers is not None):
        raise SettingsError("drafting through text takes a draft model: name one with draft (--draft NAME)")
    draft_plan = _plan(os.fspath(draft), dtype, progress) if draft is not None and own_layers is None else None
    _require_memory(plan, draft_plan)
    tokenizer = load_tokenizer(plan.checkpoint)
    learning: bool | Learning = False
    if learn:
        from localspec.learning import Learning

        learning = Learning(tokenizer, label=plan.name, say=notify)
    draft_tokenizer, through_text = None, False
    if draft_plan is not None:
        draft_tokenizer = load_tokenizer(draft_plan.checkpoint)
        try:
            check_same_vocabulary(tokenizer, draft_tokenizer)
        except IncompatibleDrafterError:
            if not draft_through_text:
                raise
            through_text = True
    chosen: list[Any] = ["ngram"] if drafters is None else list(drafters)
    model = load_weights(plan.checkpoint, plan.dtype)
    if draft_plan is not None:
        from localspec.drafters import ModelDrafter, TextDrafter

        draft_model = load_weights(draft_plan.checkpoint, draft_plan.dtype)
        draft_window = context_length(draft_plan.checkpoint.config)
        if through_text:
            chosen.append(TextDrafter(draft_model, draft_tokenizer, tokenizer, context_length=draft_window))
        else:
            chosen.append(ModelDrafter(draft_model, context_length=draft_window))
    if own_layers is not None:
        from localspec.drafters.layer_skip import layer_skip

        chosen.append(layer_skip(model, own_layers or None))
    window = context_length(plan.checkpoint.config)
    return Engine(
        model, tokenizer, drafters=chosen, name=plan.name, context_length=window, kernels=kernels, learn=learning
    )


def layers_asked_for(draft: str | os.PathLike[str] | None) -> int | None:
    """How many of the target's own layers are to draft: N of "layers:N", 0 of "layers"; None for all other drafts."""
    kind, colon, count = ("" if draft is None else os.fspath(draft)).partition(":")
    if kind != "layers":
        return None
    if colon and not (count.isascii() and count.isdigit() and int(count)):
        raise SettingsError(f'"layers:N" runs N of the model\'s layers, at least 1, not {count!r}')
    return int(count) if colon else 0


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    """The model's tokenizer, knowing every end token that any of the model's files names. Runs none of its code."""
    from mlx_lm.utils import load_tokenizer as load_from

    try:
        tokenizer = load_from(checkpoint.path, {"trust_remote_code": False})
    except (ValueError, OSError, LookupError, TypeError, AttributeError, ImportError) as error:
        raise UnsupportedModelError(f"the tokenizer of {checkpoint.path} cannot be loaded: {_line(error)}") from error
    size = max(tokenizer.get_vocab().values(), default=-1) + 1
    tokenizer.eos_token_ids = set(tokenizer.eos_token_ids) | {i for i in end_ids(checkpoint) if i < size}
    return tokenizer


def load_weights(checkpoint: Checkpoint, dtype: str) -> Any:
    """The model with its weights in `dtype` (one of DTYPES), evaluated, so that no array waits for this thread."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    if "model_file" in checkpoint.config:
        raise UnsupportedModelError(
            f"{checkpoint.path} wants to run its own code (model_file in config.json), which localspec never does"
        )
    if "model_type" not in checkpoint.config:
        raise UnsupportedModelError(
            f"{checkpoint.path}: config.json names no model_type, so it is not known how to run it"
        )
    with _only_its_files(checkpoint) as folder:
        try:
            model, _ = load_model(folder, lazy=True)
        except ValueError as error:
            if "parameter" in str(error):  # weights missing, left over, or of another shape
                raise IncompleteModelError(
                    f"the weights of {checkpoint.path} do not match its config.json: {_line(error)}"
                ) from error
            raise UnsupportedModelError(f"{checkpoint.path} cannot be loaded: {_line(error)}") from error
        except (KeyError, TypeError, AttributeError) as error:
            # The architecture needs settings that the config lacks or spells otherwise.
            raise UnsupportedModelError(
                f"{checkpoint.path} cannot be loaded: its config.json does not fit mlx-lm's "
                f"{checkpoint.config['model_type']} ({type(error).__name__}: {_line(error)})"
            ) from error
        if dtype != "quantized":
            model = _as_float(model, getattr(mx, dtype))
        # One by one: all at once would hold every quantised tensor beside its float form. Not only parameters: what a
        # module computes for itself (rotary frequencies) must not wait for this thread's stream either.
        for _, module in model.named_modules():
            for value in module.values():
                if isinstance(value, mx.array):
                    mx.eval(value)
    return model


def _plan(name: str, dtype: str | None, progress: Progress | None) -> _Plan:
    _refuse_hopeless(name)
    path = hub.resolve(name, progress)
    return _Plan(label(name, path), read_checkpoint(path), dtype or _choose_dtype(path))


def label(name: str, path: Path) -> str:
    """What to call the model that `name` stands for, which is in `path`."""
    known = catalogue()
    entry = known.get(name) or known.by_hub(name)
    if entry is not None:
        return entry.name
    return path.name if Path(name).expanduser().is_dir() else name


def _choose_dtype(path: Path) -> str:
    """As stored on a GPU, which reads quantised weights fastest; on a CPU what `localspec.precision` measured."""
    import mlx.core as mx

    if mx.default_device().type == mx.DeviceType.gpu:
        return "quantized"
    from localspec.precision import choose_dtype

    return str(choose_dtype(path))


def _refuse_hopeless(name: str) -> None:
    """Before gigabytes are fetched: a catalogue model that would not fit as stored."""
    known = catalogue()
    entry = known.get(name) or known.by_hub(name)
    available = memory.available_bytes()
    if entry is None or available is None or entry.memory_bytes <= available or hub.find(name) is not None:
        return
    raise InsufficientMemoryError(
        f"{entry.name} needs about {format_bytes(entry.memory_bytes)} of memory and {format_bytes(available)} is "
        f"available{_smaller(available, entry.name)}"
    )


def _require_memory(plan: _Plan, draft: _Plan | None) -> None:
    available = memory.available_bytes()
    need = memory.needed_bytes(plan.bytes + (draft.bytes if draft is not None else 0))
    if available is None or need <= available:
        return
    what = f"{plan.name} in {plan.dtype}" + (f" with the draft {draft.name}" if draft is not None else "")
    stored = memory.needed_bytes(plan.checkpoint.bytes + (draft.checkpoint.bytes if draft is not None else 0))
    fits = stored <= available and plan.dtype != "quantized"
    ways = "; as stored it would fit (dtype quantized)" if fits else _smaller(available, plan.name)
    raise InsufficientMemoryError(
        f"{what} needs {format_bytes(need)} of memory and {format_bytes(available)} is available{ways}"
    )


def _smaller(available: int, name: str) -> str:
    entry = catalogue().largest_within(available)
    if entry is None or entry.name == name:
        return "; close other programs"
    return f"; a model that fits: {entry.name} ({entry.title})"


def _as_float(model: Any, dtype: Any) -> Any:
    """Quantised layers to plain ones and all floats to `dtype`, rounding once (the scales go through float32)."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_map_with_path
    from mlx_lm.utils import dequantize_model

    for _, module in model.named_modules():
        if "scales" in module and "weight" in module and isinstance(module, nn.Module):
            module.set_dtype(mx.float32)
    model = dequantize_model(model)
    # Some architectures need certain parameters left alone; mlx-lm's converter asks the same question.
    may_cast = getattr(model, "cast_predicate", lambda _: True)

    def cast(path: str, array: Any) -> Any:
        return array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) and may_cast(path) else array

    model.update(tree_map_with_path(cast, model.parameters()))
    return model


@contextmanager
def _only_its_files(checkpoint: Checkpoint) -> Iterator[Path]:
    """A directory in which mlx-lm, which merges every model*.safetensors it sees, sees the model's own files alone."""
    if set(checkpoint.path.glob("model*.safetensors")) == set(checkpoint.weights):
        yield checkpoint.path
        return
    with tempfile.TemporaryDirectory(prefix="localspec-") as name:
        folder = Path(name)
        for file in checkpoint.path.iterdir():
            if file.suffix == ".json":
                (folder / file.name).symlink_to(file.absolute())
        for number, file in enumerate(checkpoint.weights):
            (folder / f"model-{number:05}.safetensors").symlink_to(file.absolute())
        yield folder


def _line(error: BaseException) -> str:
    """The first lines of a message, as one."""
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else text[:199] + "…"
