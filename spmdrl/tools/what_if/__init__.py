"""Other losses, advantages and corrections on what a run recorded: what each would have done."""
