"""Provide dispatchers beyond those of dispatch.py, and choose one for each layer (choose.py).

Those with another library's kernels share by_library.py; the library is imported only when a configuration names it.
"""
