"""The commands of quotas: one entity's, the catalog as a file, imports, and Kafka's own options."""
