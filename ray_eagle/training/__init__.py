"""Unrolled training of the drafter: packing, the loss of EAGLE-3's training-time test, and the Ray Train loop."""
