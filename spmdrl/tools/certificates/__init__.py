"""Compare the certificates of two runs, and repeat certified steps."""
