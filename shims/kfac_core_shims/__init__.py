"""How a framework feeds ``kfac_core``: one module or package a framework.

``kfac_core_shims.torch``, ``.jax``, ``.keras``, ``.numpy`` and ``.sklearn`` take the layer
inputs and output gradients out of a model, hand them to `kfac_core.Estimator`, and put the
preconditioned gradients where the framework's own optimizer looks for them.  Each imports
its framework when it is itself imported, and drives the core through the public names of
``kfac_core`` alone: what they do, a shim of your own can do.
"""
