"""Reward functions of the recipes: graders with their options."""

from __future__ import annotations

from functools import partial

from spmdrl.rewards import graders

tagged_answer = partial(graders.exact, where="tag", ignore_case=True)
"""1 for the reference's answer in the last <answer>."""
fenced_program = partial(graders.code, score="fraction", needs_fence=True)
"""The share of tests that the program in the last ``` block passes."""
