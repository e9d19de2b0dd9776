"""The number format of the weights, chosen by measurement.

On Metal the weights stay as they are stored. On MLX's CPU backend the fastest format depends on the BLAS, the
processor and the model's shapes, so a few layers of the same shapes are timed once, and the choice is kept: a
choice that changed between runs would change a seed's tokens. A busy machine is not measured: products in several
threads suffer most from company, and the wrong choice would stay.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

Dtype = Literal["float32", "bfloat16", "float16", "quantized"]
Costs = dict[str, dict[str, float]]
"""Format -> {"rows1_ms", "rows4_ms"}: one pass of the whole model with that many rows."""

TIE = 0.05
"""Formats whose one-row passes are within this share of the fastest are told apart by their four-row passes."""
HOPELESS = 3.0
"""A format this many times slower than the fastest at its first pass is not timed further."""
_LAYERS = 4
_LAYER_BUDGET = 12_000_000
_HEAD_BUDGET = 16_000_000
_ROUNDS = 6
_IDLE = 0.7
_WATCH_S = 0.2


@dataclass(frozen=True, slots=True)
class Shapes:
    """What the cost of a pass depends on. The defaults are SmolLM2-135M's."""

    hidden: int = 576
    intermediate: int = 1536
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    layers: int = 30
    vocabulary: int = 49152
    bits: int = 4
    group_size: int = 32
    quantized: bool = True
    """Whether the weights are stored quantized, which makes that a format to choose."""

    @classmethod
    def of(cls, model_dir: Path) -> Shapes:
        """From a model's config.json; what it does not tell keeps a plausible value."""
        try:
            config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return cls()
        if not isinstance(config, dict):
            return cls()
        stored = config.get("quantization") or config.get("quantization_config")
        text = config.get("text_config")

        def number(name: str, default: int, table: object = text if isinstance(text, dict) else config) -> int:
            value = table.get(name) if isinstance(table, dict) else None
            return value if isinstance(value, int) and value > 0 else default

        hidden = number("hidden_size", cls().hidden)
        heads = number("num_attention_heads", max(1, hidden // 64))
        return cls(
            hidden=hidden,
            intermediate=number("intermediate_size", 4 * hidden),
            heads=heads,
            kv_heads=min(number("num_key_value_heads", heads), heads),
            head_dim=number("head_dim", max(8, hidden // heads)),
            layers=number("num_hidden_layers", cls().layers),
            vocabulary=number("vocab_size", cls().vocabulary),
            bits=number("bits", 4, stored),
            group_size=number("group_size", 64, stored),
            quantized=number("bits", 0, stored) > 0,
        )

    @property
    def layer_parameters(self) -> int:
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.vocabulary * self.hidden


def choose_dtype(model_dir: Path | None = None) -> Dtype:
    """The format to run a model's weights in on this machine: measured once, then remembered."""
    import mlx.core as mx

    if mx.metal.is_available():
        return "quantized"
    dtype: Dtype = _remembered(_shapes(model_dir))["dtype"]
    return dtype


def explain(model_dir: Path | None = None) -> dict[str, Any]:
    """The choice, the numbers behind it and what they were measured with, for reports."""
    import mlx.core as mx

    if mx.metal.is_available():
        return {"dtype": "quantized", "reason": "on Metal the weights stay as they are stored", "measured": {}}
    return _remembered(_shapes(model_dir))


def pick(costs: Costs) -> str:
    """The format with the cheapest one-row pass; among near ties, the one with the cheapest four-row pass."""
    fastest = min(cost["rows1_ms"] for cost in costs.values())
    near = [name for name, cost in costs.items() if cost["rows1_ms"] <= fastest * (1 + TIE)]
    return min(near, key=lambda name: costs[name]["rows4_ms"])


def measure(shapes: Shapes) -> Costs:
    """Time a few layers and the head in each format, the formats in turn, and scale to the whole model.

    Layers rather than single products: in bfloat16 the work between the products costs as much as it saves.
    """
    import mlx.core as mx

    formats = _formats(shapes)
    stand_in, scale = _stand_in(shapes)
    passes = {name: _passes(stand_in, name) for name in formats}
    samples: dict[tuple[str, int], list[float]] = {(name, rows): [] for name in formats for rows in (1, 4)}

    def sample(name: str, rows: int) -> None:
        start = time.perf_counter()
        passes[name](rows)
        samples[name, rows].append((time.perf_counter() - start) * 1000)

    for _ in range(2):  # twice: a single slow pass can be somebody else's fault
        for name in formats:
            sample(name, 1)
    fastest = min(min(samples[name, 1]) for name in formats)
    hopeful = [name for name in formats if min(samples[name, 1]) <= HOPELESS * fastest]
    for _ in range(_ROUNDS):
        for name in hopeful:
            sample(name, 1)
            sample(name, 4)
    mx.clear_cache()
    costs = {}
    for name in formats:  # the fastest sample: what is added to it is other programs' work
        one = min(samples[name, 1])
        four = min(samples[name, 4], default=one * 4)
        costs[name] = {"rows1_ms": round(one * scale, 2), "rows4_ms": round(four * scale, 2)}
    return costs


def _shapes(model_dir: Path | None) -> Shapes:
    return Shapes() if model_dir is None else Shapes.of(Path(model_dir))


def _stand_in(shapes: Shapes) -> tuple[Shapes, float]:
    """A model cheap enough to time, with the same proportions, and the factor from its cost to the whole model's.

    Cost is linear in the number of layers and of weights: fewer and narrower layers, and a vocabulary cut so that
    the head keeps its share, leave the ratios between the formats as they are.
    """
    layers = min(shapes.layers, _LAYERS)
    narrower = max(1.0, (shapes.layer_parameters / _LAYER_BUDGET) ** 0.5)
    kv_heads = max(1, round(shapes.kv_heads / narrower))
    hidden = max(128, round(shapes.hidden / narrower / 64) * 64)
    small = replace(
        shapes,
        layers=layers,
        hidden=hidden,
        intermediate=max(128, round(shapes.intermediate / narrower / 64) * 64),
        kv_heads=kv_heads,
        heads=kv_heads * max(1, round(shapes.heads / shapes.kv_heads)),
        group_size=shapes.group_size if hidden % shapes.group_size == 0 else 32,
    )
    head_share = shapes.vocabulary * shapes.hidden / (shapes.layers * shapes.layer_parameters)
    head = min(head_share * layers * small.layer_parameters, _HEAD_BUDGET)
    small = replace(small, vocabulary=max(64, round(head / hidden)))
    return small, shapes.parameters / small.parameters


def _passes(shapes: Shapes, name: str) -> Callable[[int], None]:
    """A function that runs one pass of that many rows over a model of these shapes."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_map
    from mlx_lm.models import llama
    from mlx_lm.models.cache import KVCache

    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=shapes.hidden,
            intermediate_size=shapes.intermediate,
            num_attention_heads=shapes.heads,
            num_key_value_heads=shapes.kv_heads,
            head_dim=shapes.head_dim,
            num_hidden_layers=shapes.layers,
            rms_norm_eps=1e-5,
            vocab_size=shapes.vocabulary,
            tie_word_embeddings=True,
        )
    )
    # One value everywhere is enough for the clock and costs no random numbers; not zero, which BLAS may skip.
    dtype = mx.float32 if name == "float32" else mx.bfloat16
    model.update(tree_map(lambda weight: mx.full(weight.shape, 0.01, dtype=dtype), model.parameters()))
    if name == "quantized":
        nn.quantize(model, group_size=shapes.group_size, bits=shapes.bits)
    mx.eval(model.parameters())

    def run(rows: int) -> None:
        cache = [KVCache() for _ in model.layers]
        mx.eval(model(mx.zeros((1, rows), dtype=mx.int32), cache=cache))

    return run


def _formats(shapes: Shapes) -> list[str]:
    """The formats whose weights fit into this machine, best first where nothing is known of their speed."""
    formats = ["float32", "bfloat16"] + (["quantized"] if shapes.quantized else [])
    return [name for name in formats if _fits(shapes, name)] or formats[-1:]


def _fits(shapes: Shapes, name: str) -> bool:
    width = {"float32": 4.0, "bfloat16": 2.0, "quantized": shapes.bits / 8 + 4 / shapes.group_size}[name]
    return shapes.parameters * width < 0.7 * _memory()


def _memory() -> int:
    """All there is rather than what is free just now, which would make the choice depend on the hour."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _remembered(shapes: Shapes) -> dict[str, Any]:
    from localspec import blas
    from localspec.paths import cache_dir

    key = json.dumps(
        {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "mlx": version("mlx"),
            "blas": blas.status(),
            "shapes": asdict(shapes),
        },
        sort_keys=True,
    )
    path = cache_dir() / "precision.json"
    known = _read(path)
    if key in known:
        return known[key]
    if not _quiet():
        reason = "not measured yet: the machine is busy with other work"
        return {"dtype": _formats(shapes)[0], "blas": blas.status(), "reason": reason, "measured": {}}
    costs = measure(shapes)
    record = {"dtype": pick(costs), "blas": blas.status(), "mlx": version("mlx"), "measured": costs}
    known = _read(path)  # another process may have been faster, and the first choice is the one that stays
    record = known.setdefault(key, record)
    _write(path, known)
    return record


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """The choices made so far. A file that does not hold any is set aside, so that it can be looked at."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError):
        text = ""
    try:
        known = json.loads(text)
    except ValueError:
        known = None
    if not isinstance(known, dict) or not all(_valid(record) for record in known.values()):
        with contextlib.suppress(OSError):  # unreadable and immovable: measuring again is all that is left
            path.replace(path.with_name(path.name + ".broken"))
        return {}
    return known


def _valid(record: object) -> bool:
    if not isinstance(record, dict) or not isinstance(record.get("measured"), dict):
        return False
    return record.get("dtype") in ("float32", "bfloat16", "float16", "quantized")


def _write(path: Path, known: dict[str, dict[str, Any]]) -> None:
    from localspec.paths import atomic_write_text

    with contextlib.suppress(OSError):  # a read-only home: the choice holds for this process only
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(path, json.dumps(known, indent=1) + "\n")


def _quiet() -> bool:
    """Whether most of the machine is idle just now. True where the system does not tell."""
    before = _processor_times()
    if before is None:
        return True
    time.sleep(_WATCH_S)
    after = _processor_times()
    if after is None or after[1] <= before[1]:
        return True
    return (after[0] - before[0]) / (after[1] - before[1]) >= _IDLE


def _processor_times() -> tuple[int, int] | None:
    """Idle time and all time of all processors since the start, in ticks."""
    try:
        first, *_ = Path("/proc/stat").read_text(encoding="ascii").splitlines()
        ticks = [int(word) for word in first.split()[1:9]]
        return ticks[3] + ticks[4], sum(ticks)
    except (OSError, ValueError, IndexError):
        return None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("model name", "Model", "CPU part")):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
