"""vLLM as an engine: every file here but `engine` can be imported where vLLM is missing."""
