"""The observer of volumes: asks the brokers of a cluster for their disks, and keeps the record."""
