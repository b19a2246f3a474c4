"""Pure decisions: a frozen observation goes in, a plan comes out. No I/O, no clock, no torch."""
