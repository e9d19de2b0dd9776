"""From a model's name to an engine: plan, pair with a draft, load what was planned.

Knows nothing about decoding.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localspec.checkpoint import Checkpoint, context_length, end_ids
from localspec.errors import IncompleteModelError, LocalspecError, SettingsError, UnsupportedModelError
from localspec.package import Progress
from localspec.pairing import AUTO, leave_out, pair
from localspec.plan import plan, require_memory

if TYPE_CHECKING:
    from localspec.drafters import MTPDrafter
    from localspec.engine import Engine
    from localspec.kernels.selection import Kernels
    from localspec.learning import Learning
    from localspec.models.mtp import HeadSource

DTYPES = ("float32", "bfloat16", "float16", "quantized")
"""What `dtype=` may be; `quantized` keeps the weights as they are stored."""


def load(
    name: str | os.PathLike[str],
    *,
    draft: str | os.PathLike[str] | None = AUTO,
    mtp: str | os.PathLike[str] | None = AUTO,
    draft_through_text: bool = False,
    dtype: str | None = None,
    drafters: Sequence[Any] | None = None,
    progress: Progress | None = None,
    kernels: str | Kernels = "auto",
    learn: bool = False,
    notify: Callable[[str], None] | None = None,
    on_choice: Callable[[str], None] | None = None,
) -> Engine:
    """Load a model by catalogue name, local directory or hub id, fetching it if need be, and make an engine of it.

    `drafters` None is n-grams, and behind them what `draft` and `mtp` say. draft="auto" takes the MTP head that comes
    with the model, or with localspec; else a model of the catalogue that drafts for this one, is on this machine and
    fits into its memory, if there is any. A name is that model, which must have the same vocabulary and be smaller, and
    is fetched if need be; `draft_through_text` allows one with another vocabulary, which is slower. "layers" or
    "layers:N" has the model draft for itself, with N of its layers. "none" or None is nothing. `mtp` is the file or
    folder of an MTP head; "auto" is what `draft` says of it, "none" or None leaves it out. Where `drafters` are given,
    only what was named is put behind them. `on_choice` is told in one line what drafts.

    `dtype` is one of DTYPES; None takes what runs fastest on this machine. `kernels` and `learn` are as in
    Engine; `notify` is told in one line what is amiss with what was learned, or with a head; None warns. Everything is
    loaded and evaluated in the calling thread, which is the one to generate in.

    Raises ModelNotFoundError, DownloadError, IncompleteModelError, UnsupportedModelError, InsufficientMemoryError, and
    IncompatibleDrafterError for a draft that does not fit: all before any weights are loaded, but where weights do not
    match their config, or a named head's tensors do not fit the model. A head that nobody named and that cannot be used
    is left out, which `notify` is told.
    """
    from localspec.engine import Engine
    from localspec.kernels.selection import Kernels

    if dtype is not None and dtype not in DTYPES:
        raise SettingsError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    kernels = kernels if isinstance(kernels, Kernels) else Kernels(kernels)
    target = plan(os.fspath(name), dtype, progress)
    require_memory(target)
    tokenizer = load_tokenizer(target.checkpoint)
    wanted = None if draft is None or (draft == AUTO and drafters is not None) else os.fspath(draft)
    head = None if mtp is None or (mtp == AUTO and drafters is not None) else os.fspath(mtp)
    pairing = pair(
        target,
        tokenizer,
        wanted,
        load_tokenizer,
        mtp=head,
        through_text=draft_through_text,
        dtype=dtype,
        progress=progress,
        notify=notify,
    )
    learning: bool | Learning = False
    if learn:
        from localspec.learning import Learning

        learning = Learning(tokenizer, label=target.name, say=notify)
    chosen: list[Any] = ["ngram"] if drafters is None else list(drafters)
    model = load_weights(target.checkpoint, target.dtype)
    if pairing.head is not None:
        try:
            chosen.append(_mtp_drafter(pairing.head, model, tokenizer, notify))
        except (LocalspecError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, OSError) as error:
            if head != AUTO:
                raise
            leave_out(error, notify)  # nobody asked for it: what is wrong with it must not cost the model
            pairing = pair(target, tokenizer, wanted, load_tokenizer, mtp=None, dtype=dtype, notify=notify)
    if on_choice is not None and pairing.line is not None:
        on_choice(pairing.line)
    if pairing.draft is not None:
        from localspec.drafters import ModelDrafter, TextDrafter

        draft_model = load_weights(pairing.draft.checkpoint, pairing.draft.dtype)
        draft_window = context_length(pairing.draft.checkpoint.config)
        if pairing.through_text:
            chosen.append(TextDrafter(draft_model, pairing.tokenizer, tokenizer, context_length=draft_window))
        else:
            chosen.append(ModelDrafter(draft_model, context_length=draft_window))
    if pairing.layers is not None:
        from localspec.drafters.layer_skip import layer_skip

        chosen.append(layer_skip(model, pairing.layers or None))
    window = context_length(target.checkpoint.config)
    return Engine(
        model, tokenizer, drafters=chosen, name=target.name, context_length=window, kernels=kernels, learn=learning
    )


def _mtp_drafter(source: HeadSource, model: Any, tokenizer: Any, notify: Callable[[str], None] | None) -> MTPDrafter:
    from localspec.drafters import MTPDrafter
    from localspec.drafters.trial import Trial
    from localspec.models.mtp import load_head

    return MTPDrafter(load_head(source, model, tokenizer), trial=Trial(MTPDrafter.name, notify))


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

    from localspec.casting import as_float

    with _only_its_files(checkpoint) as folder:
        model = _open(checkpoint, folder)
        if dtype != "quantized":
            model = as_float(model, getattr(mx, dtype))
        # One by one: all at once would hold every quantised tensor beside its float form. Not only parameters: what a
        # module computes for itself (rotary frequencies) must not wait for this thread's stream either.
        for _, module in model.named_modules():
            for value in module.values():
                if isinstance(value, mx.array):
                    mx.eval(value)
    return model


def open_model(checkpoint: Checkpoint) -> Any:
    """The model with its weights as they are stored, of which none has been read yet."""
    with _only_its_files(checkpoint) as folder:
        return _open(checkpoint, folder)


def _open(checkpoint: Checkpoint, folder: Path) -> Any:
    from mlx_lm.utils import load_model

    if "model_file" in checkpoint.config:
        raise UnsupportedModelError(
            f"{checkpoint.path} wants to run its own code (model_file in config.json), which localspec never does"
        )
    if "model_type" not in checkpoint.config:
        raise UnsupportedModelError(
            f"{checkpoint.path}: config.json names no model_type, so it is not known how to run it"
        )
    try:
        model, _ = load_model(folder, lazy=True, get_model_classes=_without_heads)
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
    return model


def _without_heads(config: dict[str, Any]) -> tuple[Any, Any]:
    """mlx-lm's classes for a model whose files may hold an MTP head as well.

    Some architectures drop its tensors, others abort over them, and some do either by the layer's number in one model.
    """
    from mlx.utils import tree_flatten
    from mlx_lm.utils import _get_classes

    kind, arguments = _get_classes(config=config)

    def build(args: Any) -> Any:
        model = kind(args)
        sanitize = getattr(model, "sanitize", lambda weights: weights)

        def trunk_only(weights: dict[str, Any]) -> dict[str, Any]:
            del model.__dict__["sanitize"]
            weights = sanitize(weights)
            # Packed weights have other names beside them: what counts is the module.
            own = {name.rpartition(".")[0] for name, _ in tree_flatten(model.parameters())}
            heads = tuple(name.partition("eh_proj")[0] for name in weights if ".eh_proj." in name)
            return {
                name: array
                for name, array in weights.items()
                if name.rpartition(".")[0] in own
                or not (name.startswith(heads) or any(part.startswith("mtp") for part in name.split(".")))
            }

        model.__dict__["sanitize"] = trunk_only
        return model

    return build, arguments


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
