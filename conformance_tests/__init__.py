"""Every test there is; they run against any backend (``pytest --backend=NAME,...``)."""
