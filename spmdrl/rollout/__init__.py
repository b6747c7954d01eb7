"""Where batches come from: sampled by the policy, or rows of a dataset."""
