"""The volume observer: asks Kafka's brokers for their disk usage and writes the volume record."""
