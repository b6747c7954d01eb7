"""An engine that generates with the model's own modules of transformers."""
