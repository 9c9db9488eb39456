"""Files of other programs, read within bounds: whatever they claim, memory, disk and time stay small."""
