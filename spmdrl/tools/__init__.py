"""What reads, proves, plans and shows runs. A run that trains loads none of it."""
