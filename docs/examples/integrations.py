"""The options that the integrations have in common, and their defaults, from the code.

Prints the table of `docs/quickstarts.md`.  Signatures are read from the source, so that no
framework is imported.
"""

import ast
from pathlib import Path

import kfac_core as kc
import kfac_core_shims

ROOT = Path(kfac_core_shims.__file__).parent
INTEGRATIONS = {
    "torch": "PyTorch",
    "jax": "JAX",
    "keras": "Keras",
    "numpy": "NumPy",
}
MEANING = {
    "likelihood": "likelihood of one row of outputs: a name, an object of "
    "`kfac_core.losses`, or a `kfac_core.integration.RowLoss`",
    "reduction": "reduction over the rows of outputs, in the loss whose gradients are "
    "preconditioned",
    "fisher": 'which curvature: labels drawn from the model (`"gradients"`), all of its '
    'labels (`"exact"`), or those of the data (`"empirical"`)',
    "kl_clip": "bound on $\\eta^2 \\, V \\cdot P V$, with the learning rate $\\eta$; "
    "`None` for none",
    "damping": "$\\lambda$, in units of the curvature of one row's loss",
    "decay": "factor on the old statistics at each update",
    "update_every": "steps between statistics",
    "refresh_every": "steps between factorizations (JAX: updates)",
}
# What an integration is told in another place than its `KFAC`.
ELSEWHERE = {
    "jax": {
        "likelihood": "in `losses.vectors(loss, ...)`",
        "fisher": "in `losses.vectors(..., mode=)`",
        "update_every": "in `update(captured=None)`",
    }
}


def defaults(name):
    """Return the options of an integration's `KFAC`, with their defaults as written.

    None stands for an option without a default.
    """
    single, package = ROOT / f"{name}.py", ROOT / name / "kfac.py"
    path = package if package.is_file() else single
    tree = ast.parse(path.read_text(encoding="utf-8"))
    [kfac] = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "KFAC"]
    [constructor] = [n for n in kfac.body if getattr(n, "name", "") == "__init__"]
    pairs = zip(constructor.args.kwonlyargs, constructor.args.kw_defaults, strict=True)
    return {
        argument.arg: None if default is None else as_value(ast.unparse(default))
        for argument, default in pairs
    }


def as_value(default):
    """Return a default as it is written, and one of all integrations by its value."""
    common, _, constant = default.rpartition(".")
    if common == "_DEFAULTS":  # an alias of `kc.integration.defaults`
        return repr(getattr(kc.integration.defaults, constant))
    return default


def table():
    """Return the table as Markdown."""
    by_integration = {name: defaults(name) for name in INTEGRATIONS}
    lines = [["option", "what it says", *INTEGRATIONS.values()]]
    lines.append(["---"] * len(lines[0]))
    for option, meaning in MEANING.items():
        cells = [f"`{option}=`", meaning]
        for name in INTEGRATIONS:
            if option not in by_integration[name]:
                cells.append(ELSEWHERE[name][option])
            else:
                default = by_integration[name][option]
                cells.append("required" if default is None else f"`{default}`")
        lines.append(cells)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


if __name__ == "__main__":
    print(table())
