"""The messages on the wire, and the modules that ``make protos`` makes of them."""
