"""The adapters that come with kfac_core: one array library a file.

A file holds what is particular about its library, under the names that
`kfac_core.array.backend` lists; whatever it leaves out is done by the definitions in
the pure Array API standard.  Each is imported when arrays of its library are first met.
"""
