"""A kit that looks for leaks between adapters, revisions, salts and keys of any OpenAI server."""
