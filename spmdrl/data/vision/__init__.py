"""Images of rows and messages: read, checked, drawn, and prepared as a model's processor has it."""
