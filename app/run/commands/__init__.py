"""The commands of operators: one file or package for each noun, and their shared parts."""
