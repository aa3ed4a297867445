"""``te-fl tune``: measuring kernels' candidates, and keeping the best in a tuning file."""
