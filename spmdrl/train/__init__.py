"""Training: one optimizer step of the policy and of the models beside it."""
