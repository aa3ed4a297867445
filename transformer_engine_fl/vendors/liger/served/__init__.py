"""What packages for Liger-Kernel import of it, where it is not installed.

The names and signatures are those that Liger-Kernel documents for vendors; each module is
served under Liger's name for it while a package loads (``shim.py``).
"""
