"""Workers and trainers that the kit plays, and the groups that they make up."""
