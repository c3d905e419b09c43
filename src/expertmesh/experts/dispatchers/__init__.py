"""Dispatchers beyond the protocol and the plain ones of dispatch.py, and which of all of them a layer gets (choose.py).

Those by another library's kernels share by_library.py; the library is imported when a configuration names it, and by
nothing else.
"""
