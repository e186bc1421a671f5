"""Realistic traffic with ground truth: sent to running nodes, or written as a decision log of any size."""
