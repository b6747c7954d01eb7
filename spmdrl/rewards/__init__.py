"""Rewards: functions in verl's, TRL's or reasoning-gym's signature, run in killable processes."""
