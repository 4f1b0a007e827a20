"""Images of prompts, by reference: bounds of references, and reading what they name."""
