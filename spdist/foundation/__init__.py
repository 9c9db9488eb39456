"""What every layer may import: sizes as text, names of engines, wall time by phase, CPUs, display."""
