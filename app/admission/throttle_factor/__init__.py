"""The throttle factor in force on this node, and the clock of callers that bring their own."""
