"""Row classes: what the probe finds on models whose rounding is planted, and what decoding in one class guarantees."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from architectures import build_qwen3_next
from mlx_lm.models.cache import ArraysCache, KVCache
from tiny import ScriptDrafter, tiny_gemma, tiny_llama

from localspec import attention, probe as probes
from localspec.attention import by_row
from localspec.decoder import Decoder
from localspec.engine import Engine
from localspec.errors import SettingsError
from localspec.exactness import Exact
from localspec.probe import probe, screen
from localspec.rows import RowClass, RowClasses
from localspec.settings import Settings
from localspec.target import Target
from localspec.transaction import Transaction
