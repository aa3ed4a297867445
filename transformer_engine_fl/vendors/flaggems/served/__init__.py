"""What folders for FlagGems import of it, where it is not installed.

The names and signatures are those that FlagGems documents for vendors, and the few helpers
that their operators share; each module is served under FlagGems' name for it while a folder
loads (``shim.py``).
"""
