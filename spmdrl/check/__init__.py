"""All that is refused before a group exists, and the dry run."""
