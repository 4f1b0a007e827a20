"""Generation: from a prompt, by calls of an engine, to samples."""
