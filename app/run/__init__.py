"""What makes a running program of the rest: settings, wiring, the command line, the supervisor."""
