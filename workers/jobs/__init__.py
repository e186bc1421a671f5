"""Jobs over the decision log: functions over its columns, and their driver for the processes of one machine.

``workers.spark`` has the driver for Spark, which runs the same functions.
"""
