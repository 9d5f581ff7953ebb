"""Commands that the kit adds to ``kfac-core``, by the entry-point group of its commands."""
