"""Pictures: the report of a run as one file, and where the entries of a matrix lie."""
