"""Every operator, by subject. Importing this package fills the registry."""

import importlib
import pkgutil

for module in pkgutil.walk_packages(__path__, f"{__name__}."):
    importlib.import_module(module.name)
