"""Compiles what the modules of some packages import, for an image with a read-only root.

    python3 docker/compile_imported.py PACKAGE…

Without it, each start of a container compiles these modules again. The other modules are not
compiled, because a proxy does not need them. The files are the same at each build: they contain a
digest of their source, which is not checked at import, instead of its time.
"""

import importlib
import pkgutil
import py_compile
import sys

UNCHECKED = py_compile.PycInvalidationMode.UNCHECKED_HASH

sys.dont_write_bytecode = True
for name in sys.argv[1:]:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, f"{name}."):
        if not module.name.endswith(".__main__"):
            importlib.import_module(module.name)
loaded = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
for source in sorted(path for path in loaded if path.endswith(".py")):
    if source.startswith(sys.prefix):
        py_compile.compile(source, doraise=True, invalidation_mode=UNCHECKED)
