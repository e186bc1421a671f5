"""Everything that knows Kafka, without the command line.

- ``configuration``: `QUOTAGATE_KAFKA_*` as the configuration of kafka-python
- ``call``: one request to one broker
- ``quotas``: reads the quotas of a cluster
- ``mapping``: Kafka's quotas as ours
- ``import_plan``: the changes of an import to the catalog
- ``syntax``: the options and output of `kafka-configs.sh`
"""
