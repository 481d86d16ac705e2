"""Makes stand-ins of NVIDIA's driver, with which a vLLM for GPUs can be imported without one.

    python -m tests.gpu.driver ENVIRONMENT FOLDER

`FOLDER/libcuda.so.1` has every function of the driver that the libraries of the environment name.
Each returns "no device", an error whose text callers get; `cuInit` also adds a line to the file
STUB_CALLS, if there is that variable. `FOLDER/libnvidia-ml.so.1` reports one H200 to vLLM
(`nvml.c`). No kernel runs.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

OTHERS = re.compile(r"cu(blas|da|dnn|fft|File|file|pti|rand|solver|sparse|tensor)")
"""Libraries with the driver's prefix."""
NO_DEVICE = 100
WRITTEN = """
#include <stdio.h>
#include <stdlib.h>
int cuInit(unsigned flags) {
  const char *path = getenv("STUB_CALLS");
  FILE *file = path ? fopen(path, "a") : NULL;
  if (file) { fputs("cuInit\\n", file); fclose(file); }
  return 100;
}
int cuGetErrorString(int error, const char **text) { *text = "no device"; return 0; }
int cuGetErrorName(int error, const char **text) { *text = "NO_DEVICE"; return 0; }
"""


def make(environment: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    written = {"cuInit", "cuGetErrorString", "cuGetErrorName"}
    functions = sorted(_of_the_driver(environment) - written)
    stub = folder / "cuda.c"
    stub.write_text(
        WRITTEN + "".join(f"int {name}() {{ return {NO_DEVICE}; }}\n" for name in functions)
    )
    _compile(stub, folder / "libcuda.so.1")
    _compile(Path(__file__).with_name("nvml.c"), folder / "libnvidia-ml.so.1")


def _of_the_driver(environment: Path) -> set[str]:
    """The functions of the driver that the environment's libraries expect to be there."""
    (packages,) = environment.glob("lib/python3.*/site-packages")
    folders = (packages / "vllm", packages / "torch" / "lib", packages / "triton")
    libraries = [path for folder in folders for path in folder.rglob("*.so*") if path.is_file()]
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", *map(str, libraries)],
        capture_output=True,
        text=True,
        check=False,  # some files are not libraries
    ).stdout
    names = {line.split()[-1].partition("@")[0] for line in listed.splitlines() if line.strip()}
    for source in (packages / "triton" / "backends" / "nvidia").glob("*.c"):  # compiled when used
        names |= set(re.findall(r"\bcu[A-Z]\w+(?=\()", source.read_text()))
    return {name for name in names if re.match(r"cu[A-Z]", name) and not OTHERS.match(name)}


def _compile(source: Path, library: Path) -> None:
    words = ["gcc", "-w", "-shared", "-fPIC", f"-Wl,-soname,{library.name}"]
    subprocess.run([*words, "-o", str(library), str(source)], check=True)


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]))
