"""Arrays of any library: namespaces, backends, structures, dispatch, precision."""
