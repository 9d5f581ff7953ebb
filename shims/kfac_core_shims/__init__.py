"""How a framework feeds ``kfac_core``: one module or package a framework.

``kfac_core_shims.torch``, ``.jax``, ``.keras``, ``.numpy`` and ``.sklearn`` take the layer
inputs and output gradients out of a model, hand them to `kfac_core.Estimator`, and put the
preconditioned gradients where the framework's own optimizer looks for them.  Each imports
its framework when it is itself imported, and drives the core through the public names of
``kfac_core`` alone: what they do, an integration of your own can do.
"""

import importlib.util
import sys

__all__ = ["require"]


def require(framework: str, /, *, extra: str) -> None:
    """Raise an `ImportError` that names the extra, where a framework is not installed.

    Parameters
    ----------
    framework : str
        Module that an integration imports.
    extra : str
        Extra of ``kfac-core`` that installs it.

    Raises
    ------
    ModuleNotFoundError
        If the framework cannot be imported.
    """
    if sys.modules.get(framework) is not None:
        return
    # A module that is blocked, by None in its place, has no specification.
    blocked = framework in sys.modules
    if blocked or importlib.util.find_spec(framework) is None:
        raise ModuleNotFoundError(
            f"this integration needs {framework}, which is not installed: pip install "
            f"'kfac-core[{extra}]' (in a checkout: pip install '.[{extra}]')",
            name=framework,
        )
