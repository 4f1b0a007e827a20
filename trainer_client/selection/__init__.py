"""Selection of a step's groups by functions of the trainer's own, in a process of their own."""
