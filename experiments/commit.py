"""The commit that a result is of, for scripts that run where git can't tell."""

from absl import flags

COMMIT = flags.DEFINE_string("commit", None, "Of this code, where git can't tell.")
