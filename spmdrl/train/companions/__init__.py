"""The models beside the policy: references, teachers, value and reward models."""
