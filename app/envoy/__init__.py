"""Envoy's rate-limit service: what Envoy asks over gRPC is decided as the asks of any other caller are.

``mapping`` and ``importing`` need nothing else. The rest needs h2 and protobuf, the extra
``envoy``: only ``app.run.envoy`` imports it, when ``QUOTAGATE_ENVOY_PORT`` is set.
"""
