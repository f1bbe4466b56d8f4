"""What a reader of a model folder should know although the folder is not refused."""

from __future__ import annotations

import warnings


class CheckpointNote(UserWarning):
    """A setting or a weight of a folder that was resolved by a rule. The command line prints it as a line."""


def note(text: str) -> None:
    warnings.warn(text, CheckpointNote, stacklevel=3)
