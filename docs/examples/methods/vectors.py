"""Arithmetic on vectors of parameters, ``{"fc1": {"weight": ..., "bias": ...}, ...}``."""


def map_parameters(function, *trees):
    """Apply a function to the corresponding arrays of one or more structures."""
    return {
        layer: {
            name: function(*(tree[layer][name] for tree in trees)) for name in arrays
        }
        for layer, arrays in trees[0].items()
    }


def zeros_like(tree):
    """Return a structure of zeros with the shapes and dtypes of another."""
    return map_parameters(lambda array: 0.0 * array, tree)
