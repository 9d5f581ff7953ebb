"""The figures and measured tables of the documentation.

    python docs/examples/figures --output docs/figures

In reading order: `network` (three small networks on scikit-learn's digits, and what one of
their layers sees), `fidelity` (how near each approximation comes to the exact block, and
what it keeps), `rules` (damping), `roundoff` (precision), `pictures` (the page that
explains K-FAC), `drawing` (what the pictures have
in common).  Everything is NumPy; every reference is dense and knows nothing of the
library.
"""
