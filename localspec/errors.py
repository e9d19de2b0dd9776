"""Errors that a person can act on.

Each message says what is wrong and what to do next, in one line: the command line prints it as it is.
"""


class LocalspecError(Exception):
    """Base of everything localspec raises on purpose."""


class SettingsError(LocalspecError, ValueError):
    """A setting is outside its range; the message names the range."""


class ModelNotFoundError(LocalspecError):
    """No model by that name here, in the catalogue, or on a reachable hub."""


class IncompleteModelError(LocalspecError):
    """A model directory lacks files it needs (a broken or interrupted download)."""


class DownloadError(LocalspecError):
    """A model could not be fetched."""


class InsufficientMemoryError(LocalspecError):
    """The weights would not fit into this machine's memory."""


class PromptTooLongError(LocalspecError):
    """The prompt leaves no room in the model's context window."""


class IncompatibleDrafterError(LocalspecError):
    """The draft model and the target do not share a vocabulary."""


class CacheError(LocalspecError):
    """A key/value cache did not do what was asked of it; the message names the layer."""


class NumericsError(LocalspecError):
    """The model produced logits from which no token can be drawn (NaN or infinite)."""


class GrammarError(LocalspecError):
    """A grammar cannot be followed any further: no token is allowed, or it got too complex; the message says where."""


class UnsupportedModelError(LocalspecError):
    """A model is complete but not of a kind that can be run here; the message names what is in the way."""


class KernelWarning(RuntimeWarning):
    """A Metal kernel is not used where it was to be, or its record cannot be; the answer is the same without."""


class LearningWarning(RuntimeWarning):
    """Something about the learned n-grams that a person may want to know; the answers are the same."""


class DrafterWarning(RuntimeWarning):
    """A drafter is not used any more; the answers are the same without."""
