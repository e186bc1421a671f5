"""Envoy's rate-limit service: its gRPC requests are decided like the asks of any other caller.

``mapping`` and ``importing`` need nothing else. The rest needs h2 and protobuf, the extra
``envoy``: only ``app.run.envoy`` imports it, when ``QUOTAGATE_ENVOY_PORT`` is set.
"""
