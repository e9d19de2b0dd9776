"""The dtype of a model's, or a head's, weights. Knows nothing of files."""

from __future__ import annotations

from typing import Any


def as_float(model: Any, dtype: Any) -> Any:
    """Quantised layers to plain ones and all floats to `dtype`, rounding once (the scales go through float32)."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.utils import dequantize_model

    for _, module in model.named_modules():
        if "scales" in module and "weight" in module and isinstance(module, nn.Module):
            module.set_dtype(mx.float32)
    model = dequantize_model(model)
    cast(model, dtype)
    return model


def cast(model: Any, dtype: Any) -> None:
    """All floats of a model to `dtype`, but for those that its architecture wants left alone."""
    import mlx.core as mx
    from mlx.utils import tree_map_with_path

    # mlx-lm's converter asks the same question.
    may_cast = getattr(model, "cast_predicate", lambda _: True)

    def one(path: str, array: Any) -> Any:
        return array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) and may_cast(path) else array

    model.update(tree_map_with_path(one, model.parameters()))
