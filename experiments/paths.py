"""Where experiments write to."""

from importlib.util import find_spec
from pathlib import Path


def check_paths(
    json_path: str | None, plot_path: str | None, summary_path: str | None = None
) -> None:
    """Refuses a path that couldn't be written once all the work is done."""
    paths = {"json": json_path, "plot": plot_path, "summary": summary_path}
    for flag, path in paths.items():
        if path is not None and (Path(path).is_dir() or not Path(path).parent.is_dir()):
            raise ValueError(
                f"--{flag} must be a file in a folder that exists, got {path!r}"
            )
    if plot_path is not None and find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: install it with the extra plot")
