"""Rules of the model that stand alone, as functions and small values."""
