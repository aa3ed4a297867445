"""Stand-ins for Liger-Kernel's modules, for packages that import them where it is not installed.

They have the names and signatures that Liger-Kernel documents for vendors. Each module is
importable under Liger's name while a package loads (``shim.py``).
"""
