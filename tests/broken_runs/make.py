"""Makes the runs in which something went wrong: `python -m tests.broken_runs.make` writes them, over what is there.

They lie here to be looked at, by tests and by people: `groupstate show tests/broken_runs/hang`. Unlike golden logs they
are made again when what they tell is to be told otherwise.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from groupstate.simulate.loop import run_virtual
from tests.broken_runs.stories import STORIES

HERE = Path(__file__).parent


def make(name: str, path: Path) -> None:
    """Tell one story into a new run directory."""
    run_virtual(lambda loop: STORIES[name](loop, path))
    shutil.rmtree(path.with_name(f"{path.name}-live"), ignore_errors=True)
    for empty in [folder for folder in path.rglob("*") if folder.is_dir() and not any(folder.iterdir())]:
        empty.rmdir()  # git keeps no empty folders


def main(names: list[str]) -> None:
    for name in names or STORIES:
        with tempfile.TemporaryDirectory() as folder:
            make(name, Path(folder) / name)
            shutil.rmtree(HERE / name, ignore_errors=True)
            shutil.copytree(Path(folder) / name, HERE / name)
        print(f"made {HERE / name}")


if __name__ == "__main__":
    main(sys.argv[1:])
