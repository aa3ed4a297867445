"""The core of dispatch, without torch: one concept per module."""
