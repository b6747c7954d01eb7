"""What a run puts on record of its own numbers, so that another run can be held against them."""
