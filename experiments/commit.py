"""The commit that a result is of, for scripts that run where git can't tell."""

import re

from absl import flags

COMMIT = flags.DEFINE_string("commit", None, "Of this code, where git can't tell.")


@flags.validator("commit", message="must be the 40 digits of `git rev-parse HEAD`")
def is_commit(commit: str | None) -> bool:
    return commit is None or re.fullmatch("[0-9a-f]{40}", commit) is not None
