"""The size and the shape of the house: `python -m tests.house`.

Prints files and lines of the core and of the extras, the modules at the top of each package, our
modules that `import trainer.start` and `import proxy.app` load, circles of files, the keys of the
configuration, how many of them stand in no example (`tests.unset_keys` names them), and the targets
of `make help`. `tests.docs_words` and `tests.walk` count the rest.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.test_rooms import PACKAGES, ROOT, circles, file_imports, is_extra, modules
from tests.unset_keys import unset_keys

_LOADED = """
import sys
import {module}
ours = [name for name in sys.modules if name.partition(".")[0] in {packages!r}]
print(len(ours), sum(".extras." in name for name in ours))
"""


def lines_of(paths: list[Path]) -> int:
    return sum(len(path.read_text("utf-8").splitlines()) for path in paths)


def loaded(module: str) -> str:
    """Our modules that an import loads, and how many of them are extras."""
    program = _LOADED.format(module=module, packages=PACKAGES)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    done.check_returncode()
    every, extras = done.stdout.split()
    return f"{every} of our modules, {extras} of extras"


def main() -> None:
    for package in PACKAGES:
        own = {name: path for name, path in modules().items() if name.split(".")[0] == package}
        core = [path for name, path in own.items() if not is_extra(name)]
        extras = [path for name, path in own.items() if is_extra(name)]
        top = [path for path in core if path.parent == ROOT / package]
        print(
            f"{package}: core {len(core)} files, {lines_of(core):,} lines; extras {len(extras)} "
            f"files, {lines_of(extras):,} lines; {len(top)} modules at its top"
        )
    print(f"circles of files: {len(circles(file_imports()))}")
    for module in ("trainer.start", "proxy.app"):
        print(f"import {module}: {loaded(module)}")
    keys = re.findall(r"^- `", (ROOT / "docs/configuration.md").read_text("utf-8"), re.M)
    print(f"keys in docs/configuration.md: {len(keys)}")
    print(f"of them in no example, benchmark, manifest or page: {len(unset_keys())}")
    shown = subprocess.run(["make", "help"], capture_output=True, text=True, cwd=ROOT)
    print(f"targets of make help: {len(shown.stdout.splitlines())}")


if __name__ == "__main__":
    main()
